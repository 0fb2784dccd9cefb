"""The names of the files in a run's folder.

```
run.json            the settings, what follows from them, and the versions that wrote it
metrics.jsonl       losses and counts; a run that was interrupted writes the same bytes as one that was not
timings.jsonl       how fast the run was
checkpoint-100/     what it takes to resume from step 100; it counts once complete.json is in it
config.json, model.safetensors, tokenizer.json ...   the trained model, as transformers reads it
digests.json        the digests of the model's files when it was finished
result.json         the last file to appear: the run is finished
```
"""

SETTINGS = "run.json"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
LOGS = (METRICS, TIMINGS)
RESULT = "result.json"
CHECKPOINT_PREFIX = "checkpoint-"
COMPLETE = "complete.json"
"""The file that is written last into a checkpoint. Without it the checkpoint does not count."""
