# SPDX-License-Identifier: Apache-2.0
"""One file a family: the hooks and nothing else."""
