"""The configuration of a run. Imports no torch, no vLLM, no Prefect (a test sees to that)."""

from forebay.config.algorithm import AlgorithmConfig, CriticConfig
from forebay.config.hardware import HardwareConfig
from forebay.config.loading import load_profile, parse_config
from forebay.config.lora import LoraConfig
from forebay.config.run import Mode, RunConfig
from forebay.config.sections import (
    ColumnsConfig,
    ControlConfig,
    DataConfig,
    EvaluationConfig,
    GenerationConfig,
    ImagesConfig,
    LaunchConfig,
    LengthsConfig,
    MazeConfig,
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
