// SPDX-License-Identifier: Apache-2.0
//! How many instructions something takes, counted one by one in a copy of this process (`PTRACE_SINGLESTEP`): exact, the same
//! in every run, and there also where a CPU shows no counters. Threads on CPUs of their own.

/// Has the calling thread run on one CPU, the same for the same `number`: two threads that share one never contend.
pub fn pin(number: usize) {
    // SAFETY: an all-zero set is an empty one; the kernel writes to it and reads it with its own size; 0 is this thread.
    unsafe {
        let (mut all, mut one): (libc::cpu_set_t, libc::cpu_set_t) = (std::mem::zeroed(), std::mem::zeroed());
        if libc::sched_getaffinity(0, size_of_val(&all), &raw mut all) < 0 {
            return;
        }
        let cpus = (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &all));
        if let Some(cpu) = cpus.clone().nth(number % libc::CPU_COUNT(&all).max(1) as usize) {
            libc::CPU_SET(cpu, &mut one);
            // Where that is not allowed, the scheduler decides.
            libc::sched_setaffinity(0, size_of_val(&one), &raw const one);
        }
    }
}

/// Instructions of `work`, which neither waits nor allocates, and a few more that are the same for any work. Called while the
/// process has no other threads.
pub fn instructions(work: impl Fn()) -> Option<u64> {
    // SAFETY: the copy has this thread alone; it runs `work`, which the caller keeps to its own memory, and ends.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return None;
    }
    if child == 0 {
        // SAFETY: calls that take numbers, in the copy; it stops before and after the work, and never comes back.
        unsafe {
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            work();
            libc::raise(libc::SIGSTOP);
            libc::_exit(0);
        }
    }
    let stopped_by = || {
        let mut status = 0;
        // SAFETY: the status is written to; the process is a child of ours.
        let got = unsafe { libc::waitpid(child, &raw mut status, 0) };
        (got == child && libc::WIFSTOPPED(status)).then(|| libc::WSTOPSIG(status))
    };
    let mut steps = None;
    if stopped_by() == Some(libc::SIGSTOP) {
        let mut count = 0u64;
        loop {
            // SAFETY: the call takes numbers; the child is stopped.
            let stepped = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0) };
            match if stepped < 0 { None } else { stopped_by() } {
                Some(libc::SIGTRAP) => count += 1,
                Some(libc::SIGSTOP) => {
                    steps = Some(count);
                    break;
                }
                _ => break,
            }
        }
    }
    // SAFETY: the process is a child of ours, and is waited for, so that its number is nobody else's.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    steps
}
