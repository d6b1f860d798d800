"""Tests of the web pages in Chromium."""
