"""A user-defined loss or advantage that fails is refused before any model is loaded."""

import pytest

from meshrl.algo.trial import try_user_functions
from meshrl.config.algo import AlgoConfig, KlConfig, UserLossConfig
from meshrl.core.errors import ConfigError


def loss(name: str, **args) -> AlgoConfig:
    return AlgoConfig(loss=UserLossConfig(kind=f"own_algorithms:{name}", **args))


@pytest.mark.parametrize(
    "cfg",
    [
        AlgoConfig(),
        loss("gspo"),
        loss("length_scaled", scale=1.0),
        loss("only_entropy"),
        AlgoConfig(advantage="own_algorithms:batch_scaled"),
        AlgoConfig(advantage="own_algorithms:by_token", kl=KlConfig(coef=0.1, place="reward")),
    ],
    ids=lambda cfg: f"{cfg.advantage} {cfg.loss.kind}",
)
def test_valid_functions_pass(cfg: AlgoConfig):
    try_user_functions(cfg)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (loss("length_scaled", scale="x"), "algo.loss.kind is 'own_algorithms:length_scaled': a trial .* TypeError"),
        (loss("length_scaled", scale=1.0, power=float("nan")), "its gradient .* nan.*; it must be finite"),
        (loss("mean"), r"the loss is \[\]"),
        (AlgoConfig(advantage="own_algorithms:of_nothing"), "algo.advantage is .*of_nothing.* returned a NoneType"),
        (
            AlgoConfig(advantage="own_algorithms:divided_by_the_spread"),
            "algo.advantage is .* nan in float32; it must be finite",
        ),
        (AlgoConfig(advantage="own_algorithms:no_such_function"), "has no 'no_such_function'"),
    ],
    ids=lambda value: value.loss.kind if isinstance(value, AlgoConfig) else None,
)
def test_a_failing_function_is_a_config_error_with_the_key(cfg: AlgoConfig, message: str):
    with pytest.raises(ConfigError, match=message):
        try_user_functions(cfg)
