"""Classes of outputs, as user code has them, that several tests share."""

import collections
import dataclasses
import typing

import torch


@dataclasses.dataclass
class Fields:
    loss: torch.Tensor
    extra: object = None


class ModelOutput(collections.OrderedDict):
    """The shape of transformers' class: fields are attributes and, where not None, keys."""

    def __post_init__(self):
        first, *others = (field.name for field in dataclasses.fields(self))
        given = getattr(self, first)
        if all(getattr(self, name) is None for name in others) and isinstance(given, (list, tuple)):
            # Rebuilt from pairs, as by type(out)(pairs).
            setattr(self, first, None)
            for name, value in given:
                setattr(self, name, value)
        for name in (first, *others):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclasses.dataclass
class Classified(ModelOutput):
    loss: typing.Any = None
    logits: typing.Any = None
    hidden: typing.Any = None
