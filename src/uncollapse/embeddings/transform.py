"""`uc.EmbeddingTransform`: center embeddings, remove common directions, whiten them or reduce their dimensions."""

import inspect
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import numpy
import torch
from torch import Tensor

from uncollapse.embeddings import geometry
from uncollapse.embeddings.geometry import Advice, Geometry, Scatter
from uncollapse.embeddings.linear_map import LinearMap, TransformModule, load_map, save_map
from uncollapse.errors import UsageError, did_you_mean

Method = Literal["auto", "none", "center", "all_but_the_top", "whiten", "pca"]
METHODS = get_args(Method)
Rows = TypeVar("Rows", Tensor, "numpy.typing.NDArray[Any]")
WIDEST = 2**15  # features: 8 GiB per matrix
WHITEN_ROWS = 2  # rows per feature that whitening needs
SMALLEST = 1e-10  # variances below this share of the largest are not amplified


class EmbeddingTransform:
    """A linear map of embeddings that is fitted without labels, in one pass over the rows.

        center            y = x − mean
        all_but_the_top   y = (I − UUᵀ)(x − mean), U the top k principal directions (arXiv 1702.01417)
        whiten            y = Σ^−½ (x − mean), Σ the covariance, shrunk towards a multiple of the identity
        pca               y = Vᵀ(x − mean), V the top `dims` principal directions
        none              y = x
        auto              one of these from the geometry of the rows, see `advice_`; often none

    It has scikit-learn's interface (`fit`, `transform`, `get_params`) and can be used in pipelines. Rows may be NumPy
    arrays or tensors. Use it for rows that are compared by cosine; classifiers trained on the rows lose accuracy. `fit`
    also takes an iterable of parts, such as a stream, and `partial_fit` a single part. Transforms fitted to different
    parts can be merged exactly. Too few rows for the method are an error.

    Args:
        method: One of the above.
        k: Number of directions that all_but_the_top removes; d/100, at least 1, if not given.
        dims: Number of dimensions that pca returns.
        shrinkage: Shrinkage of the covariance in whiten, from 0 to 1; "auto" is Ledoit and Wolf's.

    >>> import torch, uncollapse as uc
    >>> x = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)) + 5
    >>> transform = uc.EmbeddingTransform().fit(x)
    >>> transform.method_
    'all_but_the_top'
    >>> float(uc.mean_cosine(x)) > 0.9, abs(float(uc.mean_cosine(transform.transform(x)))) < 0.01
    (True, True)
    """

    def __init__(
        self,
        method: Method = "auto",
        *,
        k: int | None = None,
        dims: int | None = None,
        shrinkage: float | Literal["auto"] = "auto",
    ) -> None:
        self.method, self.k, self.dims, self.shrinkage = method, k, dims, shrinkage
        self._scatter: Scatter | None = None
        self._map: LinearMap | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments, as scikit-learn's `clone` and grid searches need them."""
        return {name: getattr(self, name) for name in list(inspect.signature(type(self)).parameters)}

    def set_params(self, **params: Any) -> Self:
        """Set arguments; a transform that was fitted is fitted anew from the same sums."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"EmbeddingTransform has no argument {name!r}.{did_you_mean(name, known)}")
            setattr(self, name, value)
        self._map = None
        return self

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to rows (n, d), or to an iterable of parts of them. y is ignored."""
        self._scatter = None
        for part in [X] if isinstance(X, Tensor | numpy.ndarray) else X:
            self.partial_fit(part)
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Fit to further rows (m, d). y is ignored."""
        rows = _tensor(X)
        if rows.dim() != 2:
            raise ValueError(f"Embeddings must have the shape (rows, features), got {tuple(rows.shape)}.")
        if rows.shape[1] > WIDEST:
            raise UsageError(
                f"A transform is fitted with matrices of features × features, of at most {WIDEST:,} features, got "
                f"{rows.shape[1]:,}. Project the rows first, such as with scikit-learn's SparseRandomProjection."
            )
        if self._scatter is None:
            self._check_arguments(rows.shape[1])  # now, not after the last of many rows
            self._scatter = Scatter(rows.shape[1])
        self._scatter.update(rows)
        self._map = None
        return self

    def merge(self, other: "EmbeddingTransform") -> "EmbeddingTransform":
        """Return the transform that is fitted to the rows of both; both need the same arguments."""
        if self.get_params() != other.get_params():
            raise ValueError(f"Transforms to merge need the same arguments, got {self} and {other}.")
        merged = type(self)(**self.get_params())
        merged._scatter = self._sums().merge(other._sums())
        return merged

    def fit_transform(self, X: Rows, y: Any = None) -> Rows:
        """Fit to rows and return them transformed."""
        return self.fit(X).transform(X)

    def transform(self, X: Rows) -> Rows:
        """Return rows (..., d) transformed, of the same kind and type; half precision is computed in float32."""
        mapped: Rows = self._fitted_map().apply(X)
        return mapped

    __call__ = transform

    @property
    def method_(self) -> str:
        """Return the method in use: what "auto" chose."""
        return self._fitted_map().method

    @property
    def n_features_in_(self) -> int:
        """Return the number of features of a row."""
        return self._fitted_map().mean.shape[0]

    @property
    def n_features_out_(self) -> int:
        """Return the number of features of a transformed row."""
        return self._fitted_map().out_dim

    @property
    def mean_(self) -> Tensor:
        """Return the mean of the rows (d,), in float64."""
        return self._fitted_map().mean

    @property
    def shrinkage_(self) -> float | None:
        """Return the shrinkage in use; None unless whitening."""
        return self._fitted_map().shrinkage

    @property
    def geometry_(self) -> Geometry:
        """Return what the choice of "auto" is made from."""
        return geometry.measure(self._sums())

    @property
    def advice_(self) -> Advice:
        """Return what "auto" would do with these rows, and why."""
        return geometry.advise(self.geometry_)

    def as_module(self) -> TransformModule:
        """Return a module for a sentence-transformers model: `SentenceTransformer(modules=[*model, module])`."""
        return TransformModule(self._fitted_map(), self.get_params())

    def save(self, folder: str | Path) -> Path:
        """Write a folder with config.json and model.safetensors, which `load` reads back."""
        return save_map(self._fitted_map(), self.get_params(), Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote. It transforms rows alike; the sums that it was fitted from are not stored."""
        linear_map, params = load_map(Path(folder))
        loaded = cls(**params)
        loaded._map = linear_map
        return loaded

    def __repr__(self) -> str:
        default = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        given = [f"{name}={value!r}" for name, value in self.get_params().items() if value != default[name]]
        return f"EmbeddingTransform({', '.join(given)})"

    def __sklearn_is_fitted__(self) -> bool:
        return self._map is not None or self._scatter is not None

    def _sums(self) -> Scatter:
        if self._scatter is None or self._scatter.count < 2:
            why = "was loaded, and the sums are not stored" if self._map is not None else "has seen fewer than two rows"
            raise ValueError(f"This transform {why}. Call fit first.")
        return self._scatter

    def _fitted_map(self) -> LinearMap:
        if self._map is None:
            self._map = self._solve(self._sums())
        return self._map

    def _check_arguments(self, dim: int) -> None:
        """Raise a UsageError if an argument is not valid for rows of `dim` features."""
        if self.method not in METHODS:
            raise UsageError(
                f"method must be one of {', '.join(METHODS)}, got {self.method!r}.{did_you_mean(self.method, METHODS)}"
            )
        if self.method == "pca" and self.dims is None:
            raise UsageError("pca needs dims, the number of dimensions to return, such as dims=128.")
        for name, most in (("k", dim - 1), ("dims", dim)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
                raise UsageError(f"{name} must be an integer from 1 to {most} for {dim} features, got {value!r}.")
        given = self.shrinkage
        if given != "auto" and (not isinstance(given, int | float) or not 0 <= given <= 1):
            raise UsageError(f"shrinkage must be from 0 to 1, or 'auto', got {given!r}.")

    def _solve(self, scatter: Scatter) -> LinearMap:
        """Return the map of the method."""
        self._check_arguments(scatter.dim)  # they may have been set after the fit
        method: str = self.method
        k = self.k
        if method == "auto":
            advice = geometry.advise(geometry.measure(scatter))
            method, k = advice.method, k or advice.k
        mean = scatter.moments.mean()
        if method in ("none", "center"):
            return LinearMap(method, mean if method == "center" else torch.zeros_like(mean))
        if method == "all_but_the_top":
            return self._all_but_the_top(scatter, mean, k or geometry.usual_k(scatter.dim))
        return self._whiten(scatter, mean) if method == "whiten" else self._pca(scatter, mean)

    def _all_but_the_top(self, scatter: Scatter, mean: Tensor, k: int) -> LinearMap:
        if scatter.dim < 2:
            raise UsageError("Rows of one feature have no direction to remove: nothing would be left.")
        _check_rows(scatter, geometry.TOP_ROWS * k, f"removing {k} directions")
        top = torch.linalg.eigh(scatter.moments.covariance()).eigenvectors[:, -k:].mT.flip(0)
        return LinearMap("all_but_the_top", mean, removed=top)

    def _whiten(self, scatter: Scatter, mean: Tensor) -> LinearMap:
        _check_rows(scatter, WHITEN_ROWS * scatter.dim, f"whitening {scatter.dim} features")
        weight = scatter.shrinkage() if self.shrinkage == "auto" else float(self.shrinkage)
        covariance = scatter.moments.covariance()
        mu = covariance.trace() / scatter.dim
        values, vectors = torch.linalg.eigh(covariance)
        values = (1 - weight) * values.clamp(min=0) + weight * mu
        scale = values.clamp(min=float(SMALLEST * values[-1])).rsqrt().nan_to_num(posinf=0.0)
        return LinearMap("whiten", mean, matrix=(vectors * scale) @ vectors.mT, shrinkage=weight)

    def _pca(self, scatter: Scatter, mean: Tensor) -> LinearMap:
        assert self.dims is not None  # it was checked
        _check_rows(scatter, self.dims + 1, f"{self.dims} principal directions")
        top = torch.linalg.eigh(scatter.moments.covariance()).eigenvectors[:, -self.dims :].mT.flip(0)
        return LinearMap("pca", mean, matrix=top)


def _check_rows(scatter: Scatter, needed: int, what: str) -> None:
    """Raise a UsageError if there are fewer rows than a method needs."""
    if scatter.count < needed:
        raise UsageError(
            f"{what.capitalize()} needs at least {needed:,} rows, got {scatter.count:,}: with fewer, noise would be "
            "amplified. Give more rows, or use method 'center'."
        )


def _tensor(rows: Any) -> Tensor:
    if not isinstance(rows, Tensor | numpy.ndarray):
        rows = numpy.asarray(rows)
    return rows if isinstance(rows, Tensor) else torch.from_numpy(numpy.ascontiguousarray(rows))
