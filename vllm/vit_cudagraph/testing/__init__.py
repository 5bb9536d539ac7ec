# SPDX-License-Identifier: Apache-2.0
"""Tools for tests and for authors of models; serving imports nothing of it unless asked to."""
