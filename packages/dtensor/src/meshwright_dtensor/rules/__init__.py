"""Sharding rules: the legal states of inputs and outputs of an op on one mesh axis, and the op to run on local tensors.

Rules give raw rows over R, P and tensor dims (:mod:`node`); :func:`refine` decides gradients (states I, X, P, dims);
:func:`localise` rewrites size arguments; :func:`check` proves a row numerically; :class:`RuleBook` holds all of it, with
the :class:`Composite` functions (linear, attention, embedding, cross-entropy, dropout, batch norm) that are handled whole.

A plugin adds rules with an OpRuleSpec whose target is a mapping of op names to rules, or a Composite.  A rule says which
dims can be sharded; each row is proved numerically before it is used:

    def swiglu(view):
        for dim in range(len(view.in_shapes[0]) - 1):
            yield (dim,), (dim,)

    RULES = {"acme.swiglu": swiglu}
"""

from meshwright_dtensor.rules.book import RuleBook as RuleBook
from meshwright_dtensor.rules.composites.base import Composite as Composite
from meshwright_dtensor.rules.composites.base import LocalContext as LocalContext
from meshwright_dtensor.rules.localise import localise as localise
from meshwright_dtensor.rules.node import NodeView as NodeView
from meshwright_dtensor.rules.node import Row as Row
from meshwright_dtensor.rules.node import Rule as Rule
from meshwright_dtensor.rules.node import RuleEntry as RuleEntry
from meshwright_dtensor.rules.node import Slot as Slot
from meshwright_dtensor.rules.node import Strategy as Strategy
from meshwright_dtensor.rules.node import finish as finish
from meshwright_dtensor.rules.node import is_random as is_random
from meshwright_dtensor.rules.node import needs_data as needs_data
from meshwright_dtensor.rules.node import refine as refine
from meshwright_dtensor.rules.node import replicate as replicate
from meshwright_dtensor.rules.verify_row import check as check
