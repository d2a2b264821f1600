"""Variables, and losses differentiable with respect to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.arguments import checked_arguments, float_array, quoted
from amp_rewrite.train.loss_scale import Gradient


class ArrayLike(NDArrayOperatorsMixin):
    """Base class of array-like objects; arithmetic with them returns numpy arrays."""

    def numpy(self) -> Array:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numpy().shape

    @property
    def dtype(self) -> str:
        """Name of the element type, such as "float32"."""
        return DType.parse(self.numpy().dtype).spelling

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*(i.numpy() if isinstance(i, ArrayLike) else i for i in inputs), **options)

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numpy())

    def __len__(self) -> int:
        return len(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __format__(self, form: str) -> str:
        return format(self.numpy()[()] if not self.shape else self.numpy(), form)


@checked_arguments()
class Variable(ArrayLike):
    """A named, mutable float32 array, like tf.Variable; arithmetic with it returns arrays.

    Args:
        value: the initial value, converted to float32.
        name: the name, which identifies the variable for optimizers and checkpoints.
    """

    def __init__(self, value: object, name: str = "Variable") -> None:
        self.name = name
        self._value = float_array(value, f"the value of variable {name!r}")

    def numpy(self) -> Array:
        """Return a copy of the value."""
        return self._value.copy()

    @property
    def array(self) -> Array:
        """The current value without a copy; do not modify it. Assignments replace it."""
        return self._value

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__  # identity, not values

    def assign(self, value: object) -> None:
        """Set the value.

        Raises:
            TrainingError: the value has a different shape.
        """
        array = float_array(value, f"the value of variable {self.name!r}")
        if array.shape != self.shape:
            raise TrainingError(f"variable {self.name!r} has shape {self.shape}, not {array.shape}; correct the array")
        self._value = array

    def assign_add(self, delta: object) -> None:
        """Add to the value."""
        self.assign(self._value + float_array(delta, "the summand"))

    def assign_sub(self, delta: object) -> None:
        """Subtract from the value."""
        self.assign(self._value - float_array(delta, "the subtrahend"))

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} shape={self.shape}>"


@runtime_checkable
class Differentiable(Protocol):
    """A loss with its own gradients, such as the `ModelLoss` of an ONNX model."""

    def __call__(self) -> Any: ...

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        """Return the gradients of `seed` times the loss; None for variables it does not depend on."""


Variables = Variable | Sequence[Variable] | Callable[[], Sequence[Variable]]
"""One variable, several, or a function that returns them, like Keras's `var_list`."""


def variable_list(variables: Variables | None, loss: object = None) -> list[Variable]:
    """Return variables as a list; None means all variables of the loss."""
    if variables is None:
        variables = getattr(loss, "variables", None)
        if variables is None:
            raise TrainingError(f"{quoted(loss)} does not list its variables; pass var_list, or use a ModelLoss")
    if isinstance(variables, Variable):
        return [variables]
    listed: object = variables() if callable(variables) and not isinstance(variables, Differentiable) else variables
    if not isinstance(listed, Iterable) or isinstance(listed, Differentiable):
        raise TrainingError(f"{quoted(variables)} is not a Variable or a list of them; pass variables after the loss")
    return [as_variable(variable) for variable in listed]


def as_variable(variable: object) -> Variable:
    if isinstance(variable, Variable):
        return variable
    raise TrainingError(f"{type(variable).__name__} is not a Variable; pass Variables, in pairs after their gradients")


class Loss(ArrayLike):
    """Base class of `Differentiable` losses. Numpy treats a loss as a number; a loss times a number is a loss."""

    variables: tuple[Variable, ...]

    def __call__(self) -> Array:
        raise NotImplementedError

    def numpy(self) -> Array:
        return np.array(float(self), np.float32)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        other: Any = next((i for i in inputs if i is not self), None)
        if ufunc is np.multiply and method == "__call__" and np.size(other) == 1:
            return self * other
        return super().__array_ufunc__(ufunc, method, *inputs, **options)

    def __mul__(self, factor: Any) -> Product:
        return Product(self, np.float32(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Product:
        return self.__mul__(1 / divisor)

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__


@dataclass(frozen=True, eq=False)
class Product(Loss):
    """The product of a loss and a number; `Differentiable` if the loss is."""

    loss: Callable[[], Any]
    factor: np.float32

    @property
    def variables(self) -> tuple[Variable, ...]:  # type: ignore[override]
        return tuple(getattr(self.loss, "variables", ()))

    def __call__(self) -> Array:
        return np.asarray(self.loss() * self.factor, np.float32)

    def __float__(self) -> float:
        return float(self.loss) * float(self.factor)  # type: ignore[arg-type]

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        return differentiable(self.loss).gradients(variables, np.asarray(seed * self.factor, np.float32))


def times(loss: Callable[[], Any], weight: object) -> Callable[[], Any]:
    """Multiply a loss by a number, the gradient with respect to the loss; None leaves the loss unchanged."""
    if weight is None:
        return loss
    array = np.asarray(weight, np.float32)
    if array.size != 1:
        raise TrainingError(f"grad_loss has shape {array.shape}, but the loss is one number; pass one number")
    return Product(loss, np.float32(array.reshape(())))


GradsAndVars = Iterable[tuple[Gradient, Variable]]


def differentiable(loss: object) -> Differentiable:
    if isinstance(loss, Differentiable):
        return loss
    raise TrainingError(
        f"{quoted(loss)} has no gradients; use a ModelLoss, or compute the gradients of get_scaled_loss(loss) yourself"
        " and pass them through get_unscaled_gradients to apply_gradients"
    )


def gradient_pairs(grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Variable]]:
    """Return pairs of gradient and variable as a list. TrainingError if no variable has a gradient."""
    items = grads_and_vars if isinstance(grads_and_vars, Iterable) else [None]
    pairs = [item if isinstance(item, (tuple, list)) else () for item in items]
    if any(len(pair) != 2 for pair in pairs):
        raise TrainingError("grads_and_vars must be pairs of (gradient, variable); pass zip(gradients, variables)")
    pairs = [(gradient, as_variable(variable)) for gradient, variable in pairs]
    if all(gradient is None for gradient, _ in pairs):
        names = ", ".join(repr(variable.name) for _, variable in pairs) or "no variables"
        raise TrainingError(f"no variable has a gradient ({names}); pass variables that the loss depends on")
    return pairs
