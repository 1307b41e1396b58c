"""Whether the weights of a model changed since pages were computed with them."""

from onchip.models import Decoder, Model


class WeightsVersion:
    """autograd counts the changes of each parameter in place: by an optimiser, `load_state_dict`,
    `copy_`. Changes through `.data` are not counted.
    """

    def __init__(self, model: Model):
        parameters = model.parameters() if isinstance(model, Decoder) else ()
        self._parameters = [p for p in parameters if not p.is_inference()]
        self.accept()

    @property
    def has_changed(self) -> bool:
        """Since `accept`."""
        return self._count() != self._accepted

    def accept(self) -> None:
        """From now on pages are computed with the weights as they are."""
        self._accepted = self._count()

    def _count(self) -> int:
        return sum([p._version for p in self._parameters])
