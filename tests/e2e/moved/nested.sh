#!/bin/sh
# A job as people start them: a script that sets things up, a Python that picks the parameters, a Python that trains.
set -e
python=$1
here=$(dirname "$0")
"$python" "$here/launcher.py" "$here/two_models.py"
echo "step done"
