"""The state of a wrapper's gradients: their norm, clipping by it, and which are not finite.

The gradients are read as the few tensors that they lie in (`flat_gradients.py`), by torch's own
functions for lists of tensors. Nothing waits for a GPU unless it says so.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from . import _torch_tensors
from .flat_gradients import joined
from .options import flag
from .witness import Witness

__all__ = ["GradHealth", "NonFinite"]

# As torch.nn.utils.clip_grad_norm_ has it.
_CLIP_EPSILON = 1e-6


class GradHealth:
    """The part of `DataParallel` that looks after gradients: those that a backward has summed into
    the `.grad` of the module's own parameters."""

    module: Any
    device_ids: Any
    _fastdp_get_runtime: Any

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients taken as one vector.

        Args:
            norm_type: which norm: a number above 0; math.inf is the largest absolute value.

        Returns:
            A 0-dim tensor on the gradients' device, 0 where there are none. NaN or infinite if a
            gradient is. Nothing waits for a GPU; reading the value does.

        Raises:
            TypeError, ValueError: a norm_type that is no number above 0.

        Equal to torch.nn.utils.get_total_norm but for the order of the sum: to 1e-5 of it in
        float32, 1e-12 in float64. Of float16 and bfloat16 gradients the norm is computed, and
        given, in float32: it does not overflow where theirs would.
        """
        order = _checked_order(norm_type)
        return _Gradients(self).norm(order)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients, in place, so that their norm is at most `max_norm`: as
        torch.nn.utils.clip_grad_norm_(module.parameters(), ...), in fewer launches.

        Args:
            max_norm: a number, at least 0.
            norm_type: as in `grad_norm`.
            error_if_nonfinite: True: a norm that is NaN or infinite is a RuntimeError, and no
                gradient is changed; to know it waits for the GPU. Else the gradients are scaled
                by it, as torch does.

        Returns:
            The norm before, as `grad_norm` gives it.

        Raises:
            TypeError, ValueError: arguments that are no numbers, or out of bounds.

        With a GradScaler call `scaler.unscale_(optimizer)` first.
        """
        bound = checked_number("max_norm", max_norm)
        if not bound >= 0:
            raise ValueError(f"max_norm is {max_norm}: it must be at least 0")
        order = _checked_order(norm_type)
        gradients = _Gradients(self)
        norm = gradients.norm(order)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the norm of order {order:g} of the gradients is {norm.item()}, so they cannot be "
                "clipped; nonfinite() tells which parameters' are not finite"
            )
        # No branch on the norm, which would have to be waited for.
        factor = torch.clamp(bound / (norm + _CLIP_EPSILON), max=1.0)
        with torch.no_grad():
            gradients.scale(factor)
        return norm

    def nonfinite(self) -> NonFinite:
        """Which gradients have elements that are NaN or infinite.

        Returns:
            A `NonFinite`. Making it waits for nothing; asking it anything does. Details are
            counted when they are asked for, in the gradients as they are then: ask before they are
            written again.

        Which replicas they come from the sums cannot tell: see `watch_replicas`.
        """
        return NonFinite(self)

    def watch_replicas(self, on: bool = True) -> None:
        """From the next backward on, looks at each replica's gradients before they are summed, so
        that `nonfinite().replicas` can say whose were not finite. Off by default, since it costs a
        few launches for each replica and bucket, and since no step is recorded while it is on:
        engine "auto" runs eagerly, "graph" raises.

        Args:
            on: False ends it, and forgets what was seen.
        """
        self.__dict__["_fastdp_witness"] = witness = Witness() if flag("on", on) else None
        if self.device_ids:
            self._fastdp_get_runtime().replicator.watch(witness)


class NonFinite:
    """What `DataParallel.nonfinite` found. True if anything is not finite."""

    def __init__(self, wrapper: Any) -> None:
        self._module = wrapper.module
        self._gradients = _Gradients(wrapper)
        # No element can hide in this norm. It may overflow where all are finite: then they are
        # counted for nothing.
        self._norm = self._gradients.norm(1.0)
        self._counts: Optional[Dict[str, int]] = None
        self._witness = wrapper.__dict__.get("_fastdp_witness")
        self._replicas: Optional[Tuple[int, ...]] = None
        self._is_alone = len(wrapper.device_ids) < 2

    @property
    def replicas(self) -> Optional[Tuple[int, ...]]:
        """The replicas that had gradients that were not finite, in any backward since this was last
        asked of the wrapper; also where the optimizer has gone on since. None if they were not
        watched (`watch_replicas`)."""
        if self._replicas is None and self._witness is not None:
            if self._is_alone:  # its gradients are the sums
                self._replicas = (0,) if self else ()
            else:
                self._replicas = self._witness.replicas()
        return self._replicas

    @property
    def parameters(self) -> Dict[str, int]:
        """How many elements are not finite, by parameter, for those that have any."""
        if self._counts is None:
            self._counts = {} if math.isfinite(float(self._norm)) else self._counted()
        return self._counts

    @property
    def count(self) -> int:
        """How many elements are not finite."""
        return sum(self.parameters.values())

    def _counted(self) -> Dict[str, int]:
        # Not the module's own: one that hides some would leave them without a name.
        named = torch.nn.Module.named_parameters(self._module)
        names = {id(parameter): name for name, parameter in named}
        values = [_values(gradient) for gradient in self._gradients.all]
        sums = [torch.isfinite(value).logical_not_().sum() for value in values]
        counts = zip(self._gradients.parameters, torch.stack(sums).tolist())
        return {names[id(parameter)]: count for parameter, count in counts if count}

    def __bool__(self) -> bool:
        return self.count > 0

    def __repr__(self) -> str:
        return f"NonFinite({self.parameters!r})"


class _Gradients:
    """The gradients of a wrapper's module as they are now."""

    def __init__(self, wrapper: Any) -> None:
        if wrapper.device_ids:
            parameters = wrapper._fastdp_get_runtime().replicator.parameters()
        else:
            parameters = tuple(wrapper.module.parameters())
        gradients = [parameter.grad for parameter in parameters]
        self.parameters = [p for p, gradient in zip(parameters, gradients) if gradient is not None]
        self.all: List[torch.Tensor] = [each for each in gradients if each is not None]
        self._dense = [each for each in self.all if each.layout == torch.strided]
        self._flats = joined(wrapper, self._dense)
        self._sparse = [each for each in self.all if each.layout != torch.strided]

    def norm(self, order: float) -> torch.Tensor:
        tensors = self._flats
        if self._sparse:
            values = [_values(gradient) for gradient in self._sparse]
            tensors = tensors + [each for each in values if each.numel()]
        norms: List[torch.Tensor] = []
        for dtype, group in _by_dtype(tensors).items():
            wide = dtype.to_real()
            if wide in (torch.float16, torch.bfloat16):
                wide = torch.float32
            if dtype.is_complex:
                group = [tensor.abs() for tensor in group]
            norms += _torch_tensors.foreach_norm(group, order, wide)
        if not norms:
            return torch.zeros((), device=self.all[0].device if self.all else "cpu")
        if len(norms) == 1:
            return norms[0]
        return torch.linalg.vector_norm(torch.stack(_of_one_dtype(norms)), order)

    def scale(self, factor: torch.Tensor) -> None:
        for dtype, group in _by_dtype(self._flats).items():
            plain = [tensor for tensor in group if not _is_lazy(tensor)]
            if plain:
                torch._foreach_mul_(plain, factor.to(dtype.to_real()))
            for tensor in filter(_is_lazy, group):
                tensor.mul_(factor)
        for gradient in self._sparse:
            if gradient.layout == torch.sparse_coo:
                gradient._values().mul_(factor)  # coalesced or not
            else:
                gradient.detach().values().mul_(factor)
        # Written as parts of others: a graph that saved one must find out.
        _torch_tensors.increment_versions(self._dense)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> Dict[torch.dtype, List[torch.Tensor]]:
    groups: Dict[torch.dtype, List[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a conjugation or negation stands out, which nothing writes through in a list."""
    return tensor.is_conj() or tensor.is_neg()


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """What a norm is taken of, without autograd: of a sparse gradient the values."""
    gradient = gradient.detach()
    if gradient.layout == torch.strided:
        return gradient
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
    return gradient.values()


def _of_one_dtype(norms: List[torch.Tensor]) -> List[torch.Tensor]:
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else norms[0].dtype
    return [norm.to(wide) for norm in norms]


def checked_number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}: it must be a number")
    return float(value)


def _checked_order(norm_type: Any) -> float:
    order = math.inf if norm_type == "inf" else checked_number("norm_type", norm_type)
    if not order > 0:
        raise ValueError(f"norm_type is {norm_type!r}: it must be above 0")
    return order
