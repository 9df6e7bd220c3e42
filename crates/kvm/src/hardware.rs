// SPDX-License-Identifier: Apache-2.0
//! What the processor does for KVM beyond running guests, as the loaded module's parameters say. For the ledger; reads files only.

use std::path::Path;

/// Modules' parameters, and what is on where they are.
const INTERRUPTS: [(&str, &str); 2] =
    [("sys/module/kvm_intel/parameters/enable_apicv", "apicv"), ("sys/module/kvm_amd/parameters/avic", "avic")];

/// Which hardware delivers interrupts to running vCPUs without exits, in the host whose files are below `root` (`/`): `apicv`,
/// `avic`, or none. A machine of ours has no PIT, for whose ticks KVM would switch it off.
#[must_use]
pub fn interrupt_hardware(root: &Path) -> Option<&'static str> {
    let is_on =
        |path: &str| std::fs::read_to_string(root.join(path)).is_ok_and(|text| matches!(text.trim(), "1" | "Y"));
    INTERRUPTS.into_iter().find(|(path, _)| is_on(path)).map(|(_, name)| name)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_say_what_is_on() {
        let root = std::env::temp_dir().join(format!("tare-interrupt-hardware-{}", std::process::id()));
        let set = |path: &str, value: &str| {
            let file = root.join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, value).unwrap();
        };
        assert_eq!(interrupt_hardware(&root), None, "no module");
        let [(intel, _), (amd, _)] = INTERRUPTS;
        for (path, name) in [(amd, "avic"), (intel, "apicv")] {
            for (value, on) in [("N\n", false), ("0\n", false), ("Y\n", true), ("1\n", true), ("\n", false)] {
                set(path, value);
                assert_eq!(interrupt_hardware(&root), on.then_some(name), "{path} is {value:?}");
            }
        }
        std::fs::remove_dir_all(&root).unwrap();
    }
}
