"""Commands for images of jobs on disk."""

from __future__ import annotations

from hegmctl.grammar.rows import Form, Verb
from hegmctl.grammar.words import FILES, TEXT, Argument, Of, Option

_OPERATION = "operating_text:operation_text"

IMAGING = (
    Verb(
        "checkpoint",
        "write a running job into an image on disk",
        "Stops the job between two batches, writes its processes and the bytes that it had on GPUs into DIR, reads all "
        "of it back, and then ends the job. The image is written with the caller's own rights and is the caller's; it "
        "holds all memory of the job. Whatever fails, the job goes on where it was. `restore` brings it back, also "
        "after a reboot, or on another node with the same chip and the same files.",
        request="checkpoint",
        render=_OPERATION,
        options=(
            Of(
                "leave_running",
                doc="let the job go on as soon as its processes are written; its bytes are written while it trains",
            ),
        ),
        arguments=(
            Of("pid"),
            Of("path", doc="the directory that the image is to have; it must not be there yet"),
        ),
        examples=(
            ("hegmctl checkpoint 4711 /images/train", "have job 4711 on disk, and its GPU free"),
            ("hegmctl checkpoint --leave-running 4711 /images/train", "and let it go on"),
        ),
    ),
    Verb(
        "restore",
        "bring a job back from an image",
        "Reads the image, has CRIU make the processes again, under the numbers that they had, and puts their bytes "
        "back; done means that the next batch was seen. What fails before the processes are there leaves nothing but "
        "the image; after that it leaves a suspended job, which `resume` brings back. So does --timeout. What the job "
        "said into a pipe or on a terminal leads nowhere after it, unless --stdout or --stderr name a file.",
        request="restore",
        render=_OPERATION,
        handler="imaging:restore",
        options=(
            Of("to", doc="the GPU to go on at; else where it was"),
            Of(
                "as_then",
                names=("--truncate-outputs",),
                doc="cut files that have grown since back to where the job was, with the caller's rights",
            ),
            Option(
                "--stdout",
                kind=TEXT,
                metavar="FILE",
                complete=FILES,
                doc="append its output there; `-` is to ours",
                field="outlets",
            ),
            Option("--stderr", kind=TEXT, metavar="FILE", complete=FILES, doc="the same for its standard error"),
        ),
        arguments=(Of("path", doc="the image"),),
        examples=(
            ("hegmctl restore /images/train --to gpu1", "let it go on, on gpu1"),
            ("hegmctl restore /images/train --stdout train.log", "and have what it says in train.log"),
        ),
    ),
    Verb(
        "images ls",
        "show images of jobs, and what is left of some",
        "Takes no daemon: it is done with the caller's own rights.",
        exits="Exit status 15 says that one is broken, or left over from a writer that was killed.",
        handler="images:ls",
        forms=(Form(record="hegmd.protocol.images:ImagesSeen"),),
        arguments=(Argument("DIR", many=True, complete=FILES, doc="an image, or a directory with some; else `.`"),),
    ),
    Verb(
        "images show",
        "show what an image is of",
        "Reads the manifest and sees that every file is there. With --json, all of it.",
        handler="images:show",
        forms=(Form(record="hegmd.protocol.images:Manifest"),),
        arguments=(Argument("DIR", complete=FILES, doc="the image"),),
    ),
    Verb(
        "images verify",
        "read all of an image and compare it with its checksums",
        "Reads from the disk, past the page cache where the file system lets it. Whatever is damaged is found by the "
        "code that a restore runs. A file that is no part of the image is named, and does no harm. Whose key has "
        "signed the image, and what a node lacks for it, is told by `hegmctl restore --dry-run`.",
        handler="images:verify",
        forms=(Form(record="hegmd.protocol.images:ImageVerified"),),
        arguments=(Argument("DIR", complete=FILES, doc="the image"),),
    ),
    Verb(
        "images rm",
        "remove images, or what is left of some",
        "Only images are removed, and only what is an image's in them; not one that is being written or restored.",
        handler="images:rm",
        forms=(Form(record="hegmd.protocol.images:ImageRemoved"),),
        options=(Option("-y", "--yes", doc="do not ask before that"),),
        arguments=(Argument("DIR", many=True, complete=FILES, doc="the images"),),
        examples=(("hegmctl images rm --yes .job.hegm-new-1a2b3c4d", "what a killed writer left of `job`"),),
    ),
)
