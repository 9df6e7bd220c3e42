// SPDX-License-Identifier: Apache-2.0
//! The kernel's command line when the user gave none. Read by `machine` when it loads the kernel.
//!
//! Chosen from what the description says, never from what an image holds: the root is the whole first disk.

use std::borrow::Cow;

use crate::{Console, Vm};

impl Vm {
    /// The user's command line, or one that fits the console and the first disk:
    ///
    /// * `console=tty0 console=hvc0` or `console=ttyS0`, after the console. `tty0` is the kernel's built-in dummy screen: stock
    ///   kernels have virtio-console as a module, and an initrd whose `/dev/console` can't be opened until then loads none;
    /// * `root=/dev/vda rw` (`ro` for a read-only disk) with a disk; an image with a partition table needs
    ///   `root=/dev/vda1` said by the user;
    /// * `reboot=k panic=-1`: a guest reboots through the keyboard controller, and a kernel that panics resets at once
    ///   instead of hanging, so that the monitor sees it;
    /// * `cryptomgr.notests`: kernels that test their cryptography when they start take more than half of a boot for it. Who
    ///   wants the tests (FIPS does) says a line of their own.
    #[must_use]
    pub fn command_line(&self) -> Cow<'_, str> {
        if let Some(cmdline) = &self.cmdline {
            return Cow::Borrowed(cmdline);
        }
        let console = match self.console {
            Console::Virtio => "console=tty0 console=hvc0 ",
            Console::Serial => "console=ttyS0 ",
            Console::None => "",
        };
        let root = match self.disks.first() {
            Some(disk) if disk.readonly => "root=/dev/vda ro ",
            Some(_) => "root=/dev/vda rw ",
            None => "",
        };
        Cow::Owned(format!("{console}{root}reboot=k panic=-1 cryptomgr.notests"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Disk;

    #[test]
    fn fits_console_and_disk() {
        let mut vm = Vm::new("k");
        assert_eq!(vm.command_line(), "console=tty0 console=hvc0 reboot=k panic=-1 cryptomgr.notests");
        vm.disks.push(Disk::new("d"));
        vm.console = Console::Serial;
        assert_eq!(vm.command_line(), "console=ttyS0 root=/dev/vda rw reboot=k panic=-1 cryptomgr.notests");
        vm.disks = vec![Disk { readonly: true, ..Disk::new("d") }];
        vm.console = Console::None;
        assert_eq!(vm.command_line(), "root=/dev/vda ro reboot=k panic=-1 cryptomgr.notests");
        vm.cmdline = Some(String::new());
        assert_eq!(vm.command_line(), "", "an empty line is the user's choice too");
    }
}
