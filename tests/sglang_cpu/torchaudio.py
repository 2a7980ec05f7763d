"""Stands in for torchaudio, whose builds on the package index are for CUDA and do not load with torch for CPUs."""

from mock_package import become_mock

become_mock(__name__, "2.11.0")
