"""Commands for images of jobs on disk."""

from __future__ import annotations

from hegmctl.grammar.rows import Command, CommandForm
from hegmctl.grammar.words import FILES, TEXT, Argument, Option, RequestField

_OPERATION = "operating_text:operation_text"

IMAGING = (
    Command(
        "checkpoint",
        "write a running job into an image on disk",
        "Quiesces the job between two batches, writes its processes and GPU memory into DIR, verifies the image, and "
        "then ends the job. The image is written with the caller's rights and contains all memory of the job. If a "
        "step fails, the job resumes where it was. `restore` restores the job, also after a reboot, or on another "
        "node with the same chip and the same files.",
        request="checkpoint",
        render=_OPERATION,
        options=(
            RequestField(
                "leave_running",
                doc="resume the job once its processes are written, and write its GPU memory while it trains",
            ),
        ),
        arguments=(RequestField("pid"), RequestField("path", doc="directory of the image; it must not exist yet")),
        examples=(
            ("hegmctl checkpoint 4711 /images/train", "write job 4711 to disk and free its GPU"),
            ("hegmctl checkpoint --leave-running 4711 /images/train", "and resume the job"),
        ),
    ),
    Command(
        "restore",
        "restore a job from an image",
        "Reads the image, lets CRIU recreate the processes with their pids, and reloads their bytes; it is done when "
        "the next batch has run. A failure, or --timeout, before the processes exist leaves only the image; after "
        "that it leaves a suspended job for `resume`. Output to a former pipe or terminal is discarded, unless "
        "--stdout or --stderr gives a file.",
        request="restore",
        render=_OPERATION,
        handler="imaging:restore",
        options=(
            RequestField("to", doc="target GPU; default: its former one, or a healthy one in its place"),
            Option(
                "--newest",
                doc="the image is a directory of images: restore the newest complete one in it that you may restore",
            ),
            RequestField(
                "as_then",
                names=("--truncate-outputs",),
                doc="truncate files that have grown since the image, with the caller's rights",
            ),
            Option(
                "--stdout",
                kind=TEXT,
                metavar="FILE",
                complete=FILES,
                doc="append its output to this file; `-`: our own output",
                field="outlets",
            ),
            Option("--stderr", kind=TEXT, metavar="FILE", complete=FILES, doc="the same for its standard error"),
        ),
        arguments=(RequestField("path", doc="the image"),),
        examples=(
            ("hegmctl restore /images/train --to gpu1", "resume it on gpu1"),
            ("hegmctl restore --newest /images", "after a reboot: the last image of --checkpoint-every"),
            ("hegmctl restore /images/train --stdout train.log", "and append its output to train.log"),
        ),
    ),
    Command(
        "images ls",
        "list images of jobs, and incomplete ones",
        "Needs no daemon: uses the caller's own rights.",
        exits="The exit status is 15 if an image is damaged, or left over from a writer that was killed.",
        handler="images:ls",
        forms=(CommandForm(record="hegmd.protocol.images:ImagesSeen"),),
        arguments=(Argument("DIR", many=True, complete=FILES, doc="an image, or a directory of images; default: `.`"),),
    ),
    Command(
        "images show",
        "show the contents of an image",
        "Reads the manifest and checks that every file exists. With --json, prints the whole manifest.",
        handler="images:show",
        forms=(CommandForm(record="hegmd.protocol.images:Manifest"),),
        arguments=(Argument("DIR", complete=FILES, doc="the image"),),
    ),
    Command(
        "images verify",
        "read all of an image and compare it with its checksums",
        "Reads from the disk, bypassing the page cache if the file system allows it, with the same checks as a "
        "restore. Names files that are not part of the image; they do no harm. `hegmctl restore --dry-run` checks the "
        "signature and this node.",
        handler="images:verify",
        forms=(CommandForm(record="hegmd.protocol.images:ImageVerified"),),
        arguments=(Argument("DIR", complete=FILES, doc="the image"),),
    ),
    Command(
        "images rm",
        "remove images, or incomplete ones",
        "Removes only images and their own files, and none that is being written or restored.",
        handler="images:rm",
        forms=(CommandForm(record="hegmd.protocol.images:ImageRemoved"),),
        options=(Option("-y", "--yes", doc="do not ask for confirmation"),),
        arguments=(Argument("DIR", many=True, complete=FILES, doc="the images"),),
        examples=(("hegmctl images rm --yes .job.hegm-new-1a2b3c4d", "remove what a killed writer left of `job`"),),
    ),
)
