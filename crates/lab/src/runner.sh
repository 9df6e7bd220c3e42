# SPDX-License-Identifier: Apache-2.0
# Runs one sample: starts the subject's command ("$@"), watches its console for marks, reads KVM's counters and the
# monitor's memory at them, and reports at the end. Nothing is printed while the sample runs. Appended by the lab to a
# preamble that sets: LAB_SCRATCH LAB_WATCH LAB_POLL LAB_LIMIT LAB_GRACE LAB_GUEST_MIB LAB_IMAGE LAB_DISK
# LAB_PREPARE LAB_PROGRAM LAB_ALONE and the words of "$@".
#
# The console goes to a regular file, so that a subject never waits for its reader. $LAB_WATCH tells what is said there and
# when the subject has ended; it looks every LAB_POLL microseconds at most, and sleeps while nothing is said.

mkdir -p "$LAB_SCRATCH" && cd "$LAB_SCRATCH" || exit 97
report=$LAB_SCRATCH/report.txt
: >"$report"
: >console
rm -f idle marks order
mkfifo idle marks order
# What a place has not enough for is said here instead of a report.
exec 6>&1
exec 3<>marks 4<>idle 5<>order
if [ ! -d /sys/kernel/debug/kvm ]; then mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null; fi
# The lab machine keeps its own console still: it is a device of the outside world.
if [ -n "$LAB_ALONE" ]; then echo 1 >/proc/sys/kernel/printk; fi
if [ -n "$LAB_IMAGE" ]; then cp --sparse=always "$LAB_IMAGE" "$LAB_DISK" || exit 96; fi
if [ -n "$LAB_PREPARE" ]; then eval "$LAB_PREPARE" >/dev/null || exit 94; fi

# Microseconds, without a fork.
now() { t=$EPOCHREALTIME; t=${t/[.,]/}; }

# KVM's counters of the subject's VM, one line.
counters() {
    dir=
    for d in /sys/kernel/debug/kvm/$pid-*; do [ -d "$d" ] && dir=$d; done
    if [ -z "$dir" ] && [ -n "$LAB_ALONE" ]; then
        for d in /sys/kernel/debug/kvm/[0-9]*-*; do [ -d "$d" ] && dir=$d; done
    fi
    line=
    [ -n "$dir" ] || return
    for name in exits io_exits mmio_exits halt_exits irq_exits irq_window_exits nmi_window_exits pf_taken insn_emulation \
        hypercalls signal_exits request_irq_exits irq_injections fpu_reload; do
        if IFS= read -r value <"$dir/$name"; then line="$line $name=$value"; fi
    done 2>/dev/null
}

# Resident memory of the monitor: every mapping but the guest's own memory, which is known by its size.
memory() {
    awk -v guest="$LAB_GUEST_MIB" '
        /^[0-9a-f]+-[0-9a-f]+ / { next }
        $1 == "Size:" { big = guest > 0 && $2 >= guest * 512; total += $2 }
        /^(Shared|Private)_Dirty:/ { dirty += $2 }
        $1 == "Rss:" { if (big) guest_rss += $2; else rss += $2 }
        $1 == "Pss:" { if (big) guest_pss += $2; else pss += $2 }
        END { printf "%%%% memory %d %d %d %d %d %d\n", rss, pss, guest_rss, guest_pss, total, dirty }
    ' "/proc/$pid/smaps" >>"$report" 2>/dev/null
}

$LAB_WATCH console "$LAB_POLL" <&5 >&3 4<&- 6>&- &
watch=$!
read -r -t 10 _ <&3 || exit 95

now; start=$t
if command -v setpriv >/dev/null 2>&1; then
    setpriv --pdeathsig KILL -- "$@" <&4 >console 2>stderr 3>&- 4>&- 5>&- 6>&- &
else
    "$@" <&4 >console 2>stderr 3>&- 4>&- 5>&- 6>&- &
fi
pid=$!
trap 'kill -9 $pid $watch 2>/dev/null; exit 98' INT TERM HUP
echo "$pid" >&5

over= end=
until [ -n "$end" ]; do
    if read -r -t 0.5 at what mark <&3; then
        case $what in
        mark)
            counters
            printf '%%%% mark %s %s%s\n' "$((at - start))" "$mark" "$line" >>"$report"
            case $mark in ready* | done*) memory ;; esac
            case $mark in done*) now; over=$((t + LAB_GRACE * 1000000)) ;; esac
            ;;
        gone)
            wait "$pid"
            end="exit $?"
            ;;
        esac
        continue
    fi
    now
    if [ $((t - start)) -gt $((LAB_LIMIT * 1000000)) ]; then
        end="limit 0"
    elif [ -n "$over" ] && [ "$t" -gt "$over" ]; then
        end="killed 0"
    else
        continue
    fi
    kill -9 "$pid"; wait "$pid" 2>/dev/null
done
now
printf '%%%% end %s %s\n' "$((t - start))" "$end" >>"$report"
{ kill "$watch"; wait "$watch"; } 2>/dev/null
# What was started beside the subject: servers.
if [ -n "$LAB_PREPARE" ]; then for job in $(jobs -p); do kill "$job" 2>/dev/null; done; fi

cat "$report"
if [ -n "$LAB_PROGRAM" ]; then echo "%% version $("$LAB_PROGRAM" --version 2>/dev/null </dev/null | head -n 1)"; fi
echo '%% console'
tail -c 65536 console
echo
echo '%% stderr'
tail -c 4096 stderr
echo
echo '%% stop'
cd / && rm -rf "$LAB_SCRATCH"
