"""The configuration of a run. Imports no torch, no vLLM, no Prefect (a test sees to that)."""

from forebay.config.algorithm import AlgorithmConfig, CriticConfig
from forebay.config.data import ColumnsConfig, DataConfig, ImagesConfig, LeaksConfig, MazeConfig
from forebay.config.hardware import HardwareConfig
from forebay.config.loading import load_profile, parse_config
from forebay.config.lora import LoraConfig
from forebay.config.run import Mode, RunConfig
from forebay.config.sections import (
    ControlConfig,
    EvaluationConfig,
    GenerationConfig,
    LaunchConfig,
    LengthsConfig,
    ModelConfig,
    RewardConfig,
    ScheduleConfig,
    StorageConfig,
    TrainingConfig,
    WarmStartConfig,
)
from forebay.config.tasks import CycleConfig, TelecomConfig

__all__ = [
    "AlgorithmConfig",
    "ColumnsConfig",
    "ControlConfig",
    "CriticConfig",
    "CycleConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "HardwareConfig",
    "ImagesConfig",
    "LaunchConfig",
    "LeaksConfig",
    "LengthsConfig",
    "LoraConfig",
    "MazeConfig",
    "Mode",
    "ModelConfig",
    "RewardConfig",
    "RunConfig",
    "ScheduleConfig",
    "StorageConfig",
    "TelecomConfig",
    "TrainingConfig",
    "WarmStartConfig",
    "load_profile",
    "parse_config",
]
