// SPDX-License-Identifier: Apache-2.0
//! KVM's part of `tare doctor`: the device node, whether there is hardware behind it, capabilities, nesting.

use std::path::Path;
use std::time::Duration;

use kvm::KvmError;
use kvm::probe::{self, Capability};
use serde_json::json;

use super::{Finding, Host};
use crate::exit::reason;

/// Longest wait for the timed loop; an interpreted one needs a tenth of a second.
const BUDGET: Duration = Duration::from_secs(10);

const GET_KVM: &str = "load kvm_intel or kvm_amd (modprobe); turn on VT-x or AMD-V in the firmware; in a virtual \
                       machine turn on nested virtualization on its host; in a container pass --device /dev/kvm";
const GET_PERMISSION: &str =
    "add yourself to the node's group (usermod -aG kvm NAME, then log in again), or run as root";
const GET_HARDWARE: &str = "use a machine with VT-x or AMD-V, or nested virtualization; for measuring without either, \
                            `tare-lab host up` makes a software machine with a real KVM inside";
const GET_NESTED: &str = "kvm_intel or kvm_amd with nested=1 on hardware";
const GET_NEWER: &str = "a newer host kernel";

/// Looks at the KVM whose node is `node`.
pub fn look(node: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    let name = node.display().to_string();
    let capabilities = match probe::capabilities(node) {
        Ok(capabilities) => {
            findings.push(Finding::ok("kvm.device", json!({"path": name}), format!("{name} opens")));
            capabilities
        }
        Err(error) => {
            let (why, get) = match &error {
                KvmError::Open { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
                    (reason(source), GET_PERMISSION)
                }
                KvmError::Open { source, .. } => (reason(source), GET_KVM),
                other => (other.to_string(), GET_KVM),
            };
            let found = Finding::ok("kvm.device", json!({"path": name, "error": why}), format!("{name}: {why}"));
            findings.push(found.missing("no guest runs at all", get));
            return findings;
        }
    };
    findings.push(hardware(probe::ring_zero(node, BUDGET)));
    findings.extend(capabilities.iter().map(capability));
    findings.push(cpu_features(machine::host_cpu_features(node)));
    findings.push(nested(&Host::real()));
    findings.push(interrupt_hardware(&Host::real()));
    findings
}

/// What the timed loop says.
fn hardware(timed: Result<probe::RingZero, KvmError>) -> Finding {
    const KEY: &str = "kvm.hardware";
    match timed {
        Ok(t) => {
            let value = json!({
                "hardware": t.is_hardware(),
                "ring0_instruction_ns": (t.instruction_ns * 100.0).round() / 100.0,
                "exit_ns": t.exit_ns.round(),
            });
            let times = format!("{:.2} ns a ring-0 instruction, {:.0} ns an exit", t.instruction_ns, t.exit_ns);
            if t.is_hardware() {
                Finding::ok(KEY, value, format!("yes: {times}"))
            } else {
                Finding::ok(KEY, value, format!("no, guest kernels are interpreted: {times}"))
                    .missing("booting a Linux kernel takes hours; only tiny guests are of use", GET_HARDWARE)
            }
        }
        Err(error) => {
            let text = error.to_string();
            Finding::ok(KEY, json!({"hardware": null, "error": text}), format!("the timed guest failed: {text}"))
                .missing("a KVM that can't run a loop runs no kernel", GET_HARDWARE)
        }
    }
}

/// What a capability is for: its key, and what tare does without it. `None` for the cost: tare can't do without.
struct Use {
    name: &'static str,
    key: &'static str,
    cost: Option<&'static str>,
    get: &'static str,
}

const fn needed(name: &'static str, key: &'static str) -> Use {
    Use { name, key, cost: None, get: "Linux 5.10 or newer on the host" }
}

const fn useful(name: &'static str, key: &'static str, cost: &'static str) -> Use {
    Use { name, key, cost: Some(cost), get: GET_NEWER }
}

/// What no kernel brings.
const fn needs(get: &'static str, of: Use) -> Use {
    Use { get, ..of }
}

const USES: &[Use] = &[
    needed("irqchip", "kvm.cap.irqchip"),
    needed("irqfd", "kvm.cap.irqfd"),
    needed("ioeventfd", "kvm.cap.ioeventfd"),
    needed("irq_routing", "kvm.cap.irq_routing"),
    needed("signal_msi", "kvm.cap.signal_msi"),
    needed("immediate_exit", "kvm.cap.immediate_exit"),
    needed("max_vcpus", "kvm.cap.max_vcpus"),
    needed("memory_slots", "kvm.cap.memory_slots"),
    useful("recommended_vcpus", "kvm.cap.recommended_vcpus", "no advice on how many vCPUs run well"),
    useful("split_irqchip", "kvm.cap.split_irqchip", "the I/O interrupt controller can't be moved out of KVM"),
    useful("irqfd_resample", "kvm.cap.irqfd_resample", "level interrupts of passed-through devices need an exit each"),
    useful(
        "ioeventfd_any_length",
        "kvm.cap.ioeventfd_any_length",
        "kicks of virtio queues are matched by length, slower",
    ),
    useful("readonly_mem", "kvm.cap.readonly_mem", "no ROM: a guest may write to what should be read-only"),
    useful("dirty_ring", "kvm.cap.dirty_ring", "live snapshots scan bitmaps of all memory instead of a list of pages"),
    useful("manual_dirty_log", "kvm.cap.manual_dirty_log", "reading the dirty log stops the guest for longer"),
    useful("coalesced_mmio", "kvm.cap.coalesced_mmio", "batched register writes exit one by one"),
    useful("coalesced_pio", "kvm.cap.coalesced_pio", "each character on the serial console is an exit"),
    useful("binary_stats", "kvm.cap.binary_stats", "the ledger has no statistics from KVM itself"),
    useful("x2apic_api", "kvm.cap.x2apic_api", "no interrupts to vCPU numbers above 254"),
    useful("tsc_deadline", "kvm.cap.tsc_deadline", "guests use slower timers"),
    needs(
        "a processor with TSC scaling",
        useful("tsc_control", "kvm.cap.tsc_control", "a snapshot can't move to a host with another clock rate"),
    ),
    useful("halt_poll", "kvm.cap.halt_poll", "polling before sleep can't be set for each guest"),
    useful("disable_exits", "kvm.cap.disable_exits", "idle guests always exit, even on processors of their own"),
    useful("user_space_msr", "kvm.cap.user_space_msr", "unknown MSRs can't be looked at by the monitor"),
    useful("xsave2", "kvm.cap.xsave2", "guests can't have AMX state in snapshots"),
    useful("guest_memfd", "kvm.cap.guest_memfd", "no guest-private memory"),
    needs(
        GET_NESTED,
        useful("nested_state", "kvm.cap.nested_state", "a guest that runs guests can't be put in a snapshot"),
    ),
];

fn capability(capability: &Capability) -> Finding {
    let known = USES.iter().find(|u| u.name == capability.name);
    let key = known.map_or(capability.name, |u| u.key);
    let said = match capability.value {
        0 => "no".to_owned(),
        1 => "yes".to_owned(),
        n => n.to_string(),
    };
    let found = Finding::ok(key, capability.value, said);
    match known {
        Some(_) if capability.value > 0 => found,
        Some(Use { cost: Some(cost), get, .. }) => found.lacking(cost, get),
        Some(Use { cost: None, get, .. }) => found.missing("tare can't run without it", get),
        None => found,
    }
}

/// The names that `tare run --cpu` can take away or insist on here.
fn cpu_features(found: Result<Vec<&'static str>, machine::Error>) -> Finding {
    const KEY: &str = "kvm.cpu_features";
    match found {
        Ok(names) => Finding::ok(KEY, names.clone(), format!("{} for --cpu: {}", names.len(), names.join(" "))),
        Err(error) => {
            let text = error.to_string();
            Finding::ok(KEY, json!({"error": text}), text.clone()).missing("no guest runs at all", GET_NEWER)
        }
    }
}

fn nested(host: &Host) -> Finding {
    const KEY: &str = "kvm.nested";
    let modules = ["kvm_intel", "kvm_amd"];
    let on = modules.iter().find_map(|m| host.read(&format!("sys/module/{m}/parameters/nested")));
    let inside = host.read("proc/cpuinfo").is_some_and(|text| {
        text.lines().find(|l| l.starts_with("flags")).is_some_and(|l| l.split_whitespace().any(|f| f == "hypervisor"))
    });
    let on = on.is_some_and(|v| v == "1" || v == "Y");
    let place = if inside { "this host is itself a guest" } else { "this host is no guest" };
    let value = json!({"guests_can_nest": on, "host_is_guest": inside});
    let found = Finding::ok(KEY, value, format!("guests can{} run guests; {place}", if on { "" } else { "not" }));
    if on { found } else { found.lacking("no KVM inside guests", GET_NESTED) }
}

/// APICv or AVIC: interrupts delivered without exits.
fn interrupt_hardware(host: &Host) -> Finding {
    let parameters = ["sys/module/kvm_intel/parameters/enable_apicv", "sys/module/kvm_amd/parameters/avic"];
    let on = parameters.iter().find_map(|p| host.read(p)).is_some_and(|v| v == "1" || v == "Y");
    let found = Finding::ok("kvm.apic_hardware", on, if on { "yes (APICv or AVIC)" } else { "no" });
    if on {
        found
    } else {
        found.lacking(
            "each interrupt to a running vCPU is an exit",
            "a processor with APICv or AVIC; kvm_amd with avic=1",
        )
    }
}

#[cfg(test)]
pub(super) fn hardware_of(timed: Result<probe::RingZero, KvmError>) -> Finding {
    hardware(timed)
}

#[cfg(test)]
pub(super) fn cpu_features_of(names: &[&'static str]) -> Finding {
    cpu_features(Ok(names.to_vec()))
}

#[cfg(test)]
pub(super) fn capability_of(name: &'static str, value: i32) -> Finding {
    capability(&Capability { name, value })
}
