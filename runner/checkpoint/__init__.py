"""Checkpoints: `store` decides when and which, `folder` names and checks files, the formats lay out bytes."""
