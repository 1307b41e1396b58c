"""The parts of a layer that families choose: windows, rotations, latent attention, experts."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from onchip.core.problem import check_head_dims
from onchip.models.fields import check_size
from onchip.models.rotary import Rotary


class ClampedSwiGLU(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate), of a gate that is at most `limit`, and of up, which
    is limited to [-limit, limit].
    """

    limit: float
    alpha: float


class ExpertGroups(NamedTuple):
    """DeepSeek's router, in fp32. A token chooses `per_token` of `num_groups` groups of experts,
    then its experts from these groups. scoring "softmax": a group is as good as its best expert.
    "sigmoid": each expert has a score of its own; for the choice a learned bias is added, and a
    group is as good as the sum of its two best experts. The weights are multiplied by `scale`.
    """

    scoring: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    per_token: int = 1
    scale: float = 1.0

    @property
    def num_best(self) -> int:
        """How many experts of a group its score is the sum of."""
        return 2 if self.scoring == "sigmoid" else 1

    def check(self, num_experts: int, per_token: int) -> None:
        """Raise ValueError for groups that these experts cannot form."""
        if not 1 <= self.per_token <= self.num_groups or num_experts % self.num_groups:
            raise ValueError(
                f"{num_experts} experts cannot form {self.num_groups} equal groups of which a token"
                f" chooses {self.per_token}"
            )
        size = num_experts // self.num_groups
        if size < self.num_best or size * self.per_token < per_token:
            raise ValueError(
                f"groups of {size} experts are too small: a token chooses {per_token} experts from"
                f" {self.per_token} groups, and a group counts by its {self.num_best} best"
            )


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: gated MLPs. Each token passes through `per_token` of them, chosen by
    the softmax of a router, or as `groups` describes. is_normalised: the weights of a token are
    divided by their sum. shared_size: the intermediate size of one more expert, through which all
    tokens pass; has_shared_gate: it is multiplied by the sigmoid of a gate. router_jitter_noise: of
    training. has_bias: the router and both products of an expert have one. swiglu: what the experts
    have in place of the activation of the config.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    is_normalised: bool = True
    shared_size: int | None = None
    router_jitter_noise: float = 0.0
    has_bias: bool = False
    swiglu: ClampedSwiGLU | None = None
    has_shared_gate: bool = True
    groups: ExpertGroups | None = None

    def __post_init__(self) -> None:
        for size in ("num_experts", "per_token", "intermediate_size"):
            check_size(size, getattr(self, size))
        if self.shared_size is not None:
            check_size("shared_size", self.shared_size)
        if self.per_token > self.num_experts:
            raise ValueError(
                f"a token cannot have {self.per_token} of num_experts={self.num_experts}"
            )
        if self.has_bias and self.shared_size is not None:
            raise ValueError("a shared expert has no biases, nor do the experts beside it")
        if self.groups is not None:
            self.groups.check(self.num_experts, self.per_token)

    @property
    def has_choice_bias(self) -> bool:
        """Whether a bias takes part in the choice of experts, and in no weight."""
        return self.groups is not None and self.groups.scoring == "sigmoid"


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of multi-head latent attention. The keys and values of all heads are projections of
    one latent vector of `kv_rank` numbers a token, and queries of one of `q_rank` (None: of the
    hidden state). A head of q and k has `plain_dim` columns that are not rotated, then `rope_dim`
    that are: of k these are the same in all heads. A head of v has `value_dim`. is_interleaved:
    the pairs that rotate are elements 2i and 2i + 1.
    """

    kv_rank: int
    q_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool = True

    def __post_init__(self) -> None:
        for size in ("kv_rank", "plain_dim", "rope_dim", "value_dim"):
            check_size(size, getattr(self, size))
        if self.q_rank is not None:
            check_size("q_rank", self.q_rank)
        check_head_dims(self.head_dim, self.value_dim)

    @property
    def head_dim(self) -> int:
        """The columns of a head of q and k."""
        return self.plain_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """The numbers of a token in the cache."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class Layer:
    """The differences between layers. window: a token sees itself and window - 1 tokens before it
    (None: all). rotary: None if positions are learned. experts: None if the layer has one MLP.
    """

    window: int | None = None
    rotary: Rotary | None = None
    experts: Experts | None = None
