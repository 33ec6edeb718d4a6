"""The networks of a mixture in groups that go through as one batch."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.features import MLP, StackedMLP, WithInputs


class Group(nn.Module):
    """Networks of a mixture whose features have the same shape, by their places in it."""

    def __init__(self, places: Sequence[int], networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.places = list(places)
        self.n_members = len(networks)
        first = networks[0]
        inner = [n.network if isinstance(n, WithInputs) else n for n in networks]
        if isinstance(inner[0], MLP) and len(inner[0]):
            stack: nn.Module = StackedMLP.of([n for n in inner if isinstance(n, MLP)])
            self.network = WithInputs(stack) if isinstance(first, WithInputs) else stack
        else:
            self.network = first

    def forward(self, Z: Float[Tensor, "m ..."]) -> Float[Tensor, "c m k"]:
        phi = self.network(Z)
        return phi.expand(self.n_members, *phi.shape[-2:]).double()


def grouped(networks: Sequence[nn.Module]) -> list[Group]:
    """MLPs of one shape together, networks without weights together, every other network alone."""
    groups: dict[object, list[int]] = {}
    for place, network in enumerate(networks):
        groups.setdefault(_kind(network, place), []).append(place)
    return [Group(places, [networks[i] for i in places]) for places in groups.values()]


def _kind(network: nn.Module, place: int) -> object:
    inner = network.network if isinstance(network, WithInputs) else network
    if isinstance(inner, nn.Identity):
        return type(network), nn.Identity
    if type(inner) is MLP and len(inner):
        shapes = tuple(p.shape for p in inner.parameters())
        return type(network), type(inner[1]), shapes, next(inner.parameters()).dtype
    return place
