"""What the losses ask of their inputs. Values are not looked at: a check for NaN would stall a GPU in every step."""

from torch import Tensor

from uncollapse.pairwise.numerics import check_tokens


def check_rows(x: Tensor, mask: Tensor | None = None, name: str = "x", gather: bool = False) -> None:
    """Raise unless x is a float tensor (..., n, d) with at least one row, unless others have some, and mask fits it."""
    check_tokens(x, mask, name)
    if x.numel() == 0 and not gather:
        raise ValueError(f"{name} must have at least one row, got shape {tuple(x.shape)}.")


def check_pair(x: Tensor, y: Tensor, names: tuple[str, str] = ("x", "y"), gather: bool = False) -> None:
    """Raise unless x and y are rows of one shape: row i of x belongs to row i of y."""
    check_rows(x, name=names[0], gather=gather)
    check_rows(y, name=names[1], gather=gather)
    if x.shape != y.shape:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same shape, row i of one belongs to row i of the other; "
            f"got {tuple(x.shape)} and {tuple(y.shape)}."
        )


def check_matrix(x: Tensor, name: str = "x") -> None:
    """Raise if x has batch dimensions."""
    if x.dim() != 2:
        raise ValueError(f"{name} must have shape (n, d), without batch dimensions, got {tuple(x.shape)}.")
