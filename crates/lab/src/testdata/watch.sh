# SPDX-License-Identifier: Apache-2.0
# Stands in for `tare-agent watch CONSOLE PERIOD` in unit tests, where no program of this project need be built.
told=0
now() { t=${EPOCHREALTIME/[.,]/}; }
tell() {
    now
    mapfile -t marks < <(sed -n 's/.*@@lab //p' "$1")
    for mark in "${marks[@]:$told}"; do echo "$t mark $mark"; done
    told=${#marks[@]}
}
now
echo "$t ready"
read -r pid
while kill -0 "$pid" 2>/dev/null && [ "$(ps -o stat= -p "$pid" 2>/dev/null | cut -c1)" != Z ]; do
    tell "$1"
    sleep 0.01
done
tell "$1"
echo "$t gone"
