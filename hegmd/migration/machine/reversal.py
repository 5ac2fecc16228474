"""Rolls an operation back, or drops its image. Shared by the actions of several events.

Owns which reason counts, and what happens to an image that is no longer needed. Pure.
"""

from __future__ import annotations

from hegmd.migration.machine import effects, next_effects
from hegmd.migration.machine.operation import BACK, FORWARD, Failure, Operation


def back(op: Operation, code: str, message: str, hint: str) -> Operation:
    """Start a rollback, unless one is running."""
    op = because(op, code, message, hint)
    return next_effects.reversed_operation(op) if op.direction == FORWARD else op


def on_again(op: Operation) -> Operation:
    """Its only process has come where it was to be after all: what turned it back counts for nothing."""
    if op.direction != BACK or len(op.workers) > 1:
        return op
    return op.replace(direction=FORWARD, failure=None)


def image_dropped(op: Operation, code: str, message: str, hint: str) -> Operation:
    """Remove the files written for the image. The job is not affected."""
    if op.image is None:
        return op
    pending = tuple([pending for pending in op.pending if pending.effect != effects.Seal.tag])
    op = op.replace(image=op.image.replace(unwanted=True), pending=pending)
    return back(op, code, message, hint)


def because(op: Operation, code: str, message: str, hint: str) -> Operation:
    """Record the failure unless an earlier one is recorded; the story has the later ones."""
    return op if op.failure is not None else op.replace(failure=Failure(code=code, message=message, hint=hint))


def resume_early(op: Operation) -> Operation:
    """Resume a quiesced job where it is."""
    pending = tuple([pending for pending in op.pending if pending.effect != effects.Hold.tag])
    return op.replace(hold_expired=True, pending=pending)


def without_image(op: Operation) -> Operation:
    """No image is written, and none has been begun."""
    return op if op.image is None else op.replace(image=op.image.replace(written=False, begun=False))
