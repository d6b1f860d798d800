"""Registers the backend when it is imported: the entry point `verl.plugins`, or `VERL_USE_EXTERNAL_MODULES`."""

from nano_inference.integrations.verl import register

register()
