"""Rollouts, pools of engines, an engine among the ranks of a trainer, and TRL's adapter."""
