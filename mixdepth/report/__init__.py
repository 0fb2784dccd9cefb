"""What runs and studies have written, as pictures and pages: reads files, and neither trains nor loads a model."""
