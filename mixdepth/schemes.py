"""Every fact about a scheme: one function for each question that the rest of the package asks. No torch.

No other module compares a scheme with anything, so a new scheme is a new answer to the questions here.
The answers to the first two questions define a scheme; those to the other questions follow from them.
"""

from typing import Literal

Scheme = Literal["expert_choice", "token_choice", "early_exit", "random", "soft"]
ExpertScheme = Literal["token_choice", "expert_choice"]
CausalRule = Literal["predictor", "aux_loss", "threshold"]
Gate = Literal["raw", "sigmoid", "tanh", "unit", "straight", "one"]
LossName = Literal["predictor_loss", "aux_loss", "capacity_loss"]

Selection = Literal["best_of_row", "own_score", "noise", "everything"]
"""How tokens are selected.

- `best_of_row`: the tokens of the row with the highest scores, which depends on later tokens.
- `own_score`: each token with a score above the threshold, as long as there is room.
- `noise`: the tokens of the row with the highest random numbers.
- `everything`: all tokens.
"""


def selection(scheme: Scheme) -> Selection:
    """Return how the scheme chooses the tokens that a layer processes."""
    match scheme:
        case "expert_choice" | "early_exit":
            return "best_of_row"
        case "token_choice":
            return "own_score"
        case "random":
            return "noise"
        case "soft":
            return "everything"


def ends_the_stack(scheme: Scheme) -> bool:
    """Return whether a token that a layer does not choose skips all later layers too."""
    match scheme:
        case "early_exit":
            return True
        case "expert_choice" | "token_choice" | "random" | "soft":
            return False


def looks_ahead(scheme: Scheme) -> bool:
    """Return whether the choice of training depends on later tokens, so that sampling needs a causal rule."""
    match selection(scheme):
        case "best_of_row":
            return True
        case "own_score" | "noise" | "everything":
            return False


def uses_noise(scheme: Scheme) -> bool:
    """Return whether the choice compares random numbers, which depend on positions and on the step, and not scores."""
    match selection(scheme):
        case "noise":
            return True
        case "best_of_row" | "own_score" | "everything":
            return False


def processes_everything(scheme: Scheme) -> bool:
    """Return whether every token passes, so that the capacity is always 1 and no layer gets cheaper."""
    match selection(scheme):
        case "everything":
            return True
        case "best_of_row" | "own_score" | "noise":
            return False


def has_threshold(scheme: Scheme) -> bool:
    """Return whether, in evaluation, a token's own score or prediction is compared with a threshold."""
    match selection(scheme):
        case "best_of_row" | "own_score":
            return True
        case "noise" | "everything":
            return False


def limits_in_stream_order(scheme: Scheme) -> bool:
    """Return whether training drops the last of the tokens that asked for a layer when it has no more room."""
    match selection(scheme):
        case "own_score":
            return True
        case "best_of_row" | "noise" | "everything":
            return False


def needs_positions(scheme: Scheme) -> bool:
    """Return whether the choice depends on the positions of the tokens."""
    return uses_noise(scheme)


def is_learned(scheme: Scheme) -> bool:
    """Return whether training has an influence on the tokens that are chosen."""
    return not uses_noise(scheme)


def losses(scheme: Scheme, causal: CausalRule | None) -> tuple[LossName, ...]:
    """Return the names of the losses that train the router or the predictor, besides the gate."""
    match selection(scheme):
        case "own_score":
            return ("capacity_loss",)
        case "best_of_row" | "noise" | "everything":
            return losses_of_rule(causal)


def losses_of_rule(causal: CausalRule | None) -> tuple[LossName, ...]:
    """Return the names of the losses that come with a causal rule."""
    match causal:
        case "predictor":
            return ("predictor_loss",)
        case "aux_loss":
            return ("aux_loss",)
        case "threshold" | None:
            return ()


def trains_scores(scheme: Scheme, causal: CausalRule | None) -> bool:
    """Return whether a loss reaches the router's scores directly, and not only through the gate."""
    names = losses(scheme, causal)
    return "capacity_loss" in names or "aux_loss" in names


def causal_rules(scheme: Scheme) -> tuple[CausalRule, ...]:
    """Return the causal rules that the scheme can have."""
    if looks_ahead(scheme):
        return ("predictor", "aux_loss", "threshold")
    return ()


def default_causal_rule(scheme: Scheme) -> CausalRule | None:
    """Return the causal rule of a language model if its configuration does not name one."""
    if looks_ahead(scheme):
        return "predictor"
    return None


def gates(scheme: Scheme) -> tuple[Gate, ...]:
    """Return the gates that the scheme can have.

    `straight` trains scores without changing what the model computes, so it makes sense only where scores choose.
    """
    if has_threshold(scheme):
        return ("raw", "sigmoid", "tanh", "unit", "straight", "one")
    return ("raw", "sigmoid", "tanh", "unit", "one")


def default_gate(scheme: Scheme) -> Gate:
    """Return the gate of a configuration that does not name one."""
    return "sigmoid" if processes_everything(scheme) else "raw"


def default_capacity(scheme: Scheme) -> float:
    """Return the capacity of a configuration that does not name one."""
    return 1.0 if processes_everything(scheme) else 0.125


def can_be_fitted(scheme: Scheme) -> bool:
    """Return whether a router can start from a least-squares fit to how far its layer moves tokens."""
    return looks_ahead(scheme) and not ends_the_stack(scheme)


def experts_choose(scheme: ExpertScheme) -> bool:
    """Return whether experts choose their tokens, so that their load is balanced and evaluation needs thresholds."""
    match scheme:
        case "expert_choice":
            return True
        case "token_choice":
            return False
