"""An Ax experiment with a Bayesian last layer as surrogate.

    python examples/clients/ax_loop.py

Ax builds, transforms and fits the model: `SingleTaskBLL` replaces BoTorch's `SingleTaskGP` in a `ModelConfig`, and
everything else is standard Ax. The script minimizes Branin's function over a box in its original units, and prints the
best value found next to that of the same experiment with `SingleTaskGP`.
"""

import argparse
import logging
import math
import warnings
from collections.abc import Sequence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ax.adapter.registry import Generators
    from ax.api.client import Client
    from ax.api.configs import RangeParameterConfig
    from ax.generation_strategy.generation_node import GenerationNode
    from ax.generation_strategy.generation_strategy import GenerationStrategy
    from ax.generation_strategy.generator_spec import GeneratorSpec
    from ax.generation_strategy.transition_criterion import MinTrials
    from ax.generators.torch.botorch_modular.surrogate import ModelConfig, SurrogateSpec
from botorch.models import SingleTaskGP
from botorch.models.model import Model

from lastlayer.integrations.botorch import SingleTaskBLL

SMALLEST = 0.397887
"""Minimum of Branin's function."""


def branin(x: float, y: float) -> float:
    valley = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return valley**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def strategy(model_class: type[Model], n_sobol: int, seed: int) -> GenerationStrategy:
    """Sobol points, then acquisition with a model of this class."""
    sobol = GenerationNode(
        "Sobol",
        [GeneratorSpec(Generators.SOBOL, generator_kwargs={"seed": seed})],
        [MinTrials(threshold=n_sobol, transition_to=model_class.__name__)],
    )
    spec = SurrogateSpec(model_configs=[ModelConfig(botorch_model_class=model_class)])
    model = GeneratorSpec(Generators.BOTORCH_MODULAR, generator_kwargs={"surrogate_spec": spec})
    return GenerationStrategy(nodes=[sobol, GenerationNode(model_class.__name__, [model])], name="from scratch")


def best_value(model_class: type[Model], trials: int, seed: int = 0) -> float:
    """Run an experiment; return the smallest value found."""
    client = Client(random_seed=seed)
    client.configure_experiment(
        [
            RangeParameterConfig(name="x", parameter_type="float", bounds=(-5, 10)),
            RangeParameterConfig(name="y", parameter_type="float", bounds=(0, 15)),
        ]
    )
    client.configure_optimization(objective="-branin")
    client.set_generation_strategy(strategy(model_class, min(8, trials - 1), seed))
    seen = []
    for _ in range(trials):
        for index, parameters in client.get_next_trials(max_trials=1).items():
            seen.append(branin(float(parameters["x"]), float(parameters["y"])))
            client.complete_trial(index, raw_data={"branin": seen[-1]})
    return min(seen)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24)
    options = parser.parse_args(arguments)
    logging.getLogger("ax").setLevel(logging.ERROR)
    logging.getLogger("ax.api.client").setLevel(logging.ERROR)
    table = {}
    for model_class in (SingleTaskBLL, SingleTaskGP):
        with warnings.catch_warnings():  # Ax and BoTorch advise on scales that they have set themselves
            warnings.simplefilter("ignore")
            table[model_class.__name__] = best_value(model_class, options.trials)
        regret = table[model_class.__name__] - SMALLEST
        print(f"{model_class.__name__:16}regret after {options.trials} trials: {regret:.4f}")
    return table


if __name__ == "__main__":
    main()
