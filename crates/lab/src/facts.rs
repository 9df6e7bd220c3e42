// SPDX-License-Identifier: Apache-2.0
//! What this host is: for the report's head, and for the choice between running directly and in the lab.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::report::Host;

/// The host's CPU, memory and kernel; unknown parts stay empty.
pub fn host() -> Host {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let value = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let memory = value(&read("/proc/meminfo"), "MemTotal").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    Host {
        cpu: value(&cpuinfo, "model name").unwrap_or_else(|| "unknown CPU".to_owned()),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        memory_mib: memory.unwrap_or(0) / 1024,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        lab: None,
        guest_kernel: None,
    }
}

/// The tare binary: as given, else beside this program, else on the PATH.
pub fn tare(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        let path = path.canonicalize().with_context(|| format!("--tare {}", path.display()))?;
        return Ok(path);
    }
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("tare")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("tare"));
    match beside.into_iter().chain(on_path).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "no tare binary beside tare-lab or on the PATH: build it (cargo build --release -p tare) or say --tare PATH"
        ),
    }
}

/// True when `tare doctor` finds hardware behind /dev/kvm.
pub fn hardware_kvm(tare: &Path) -> bool {
    if !Path::new("/dev/kvm").exists() {
        return false;
    }
    let output = Command::new(tare).args(["doctor", "--json"]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    output.is_ok_and(|output| says_hardware(&String::from_utf8_lossy(&output.stdout)))
}

/// Looks for `"hardware": true`, or a verdict of that name, anywhere in the doctor's answer.
fn says_hardware(json: &str) -> bool {
    fn find(value: &serde_json::Value) -> bool {
        match value {
            serde_json::Value::Object(map) => map.iter().any(|(key, value)| {
                (key == "hardware" && value.as_bool() == Some(true))
                    || (key == "verdict" && value.as_str() == Some("hardware"))
                    || find(value)
            }),
            serde_json::Value::Array(list) => list.iter().any(find),
            _ => false,
        }
    }
    serde_json::from_str(json).is_ok_and(|value| find(&value))
}

/// Whether a program can be started on this host.
pub fn installed(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_doctor_is_believed_only_when_it_says_hardware() {
        assert!(says_hardware(r#"{"kvm": {"present": true, "hardware": true}}"#));
        assert!(says_hardware(r#"{"checks": [{"verdict": "hardware"}]}"#));
        for text in [r#"{"kvm": {"hardware": false}}"#, r#"{"verdict": "interpreted"}"#, "", "no json"] {
            assert!(!says_hardware(text), "{text}");
        }
    }

    #[test]
    fn a_tare_that_is_not_there_is_named() {
        let error = format!("{:#}", tare(Some(Path::new("/no/such/tare"))).unwrap_err());
        assert!(error.contains("--tare /no/such/tare"), "{error}");
    }

    #[test]
    fn this_host_has_a_cpu_and_memory() {
        let host = host();
        assert!(host.cpus >= 1 && host.memory_mib > 0 && !host.kernel.is_empty());
    }
}
