// SPDX-License-Identifier: Apache-2.0
//! Suite `net`: a stream each way (iperf3) and transactions of one byte (TCP_RR, TCP_CRR as netperf defines them) between the
//! guest and the host that its monitor runs on, over whatever backend the subject's template names: `{tap}` or passt.
//!
//! Each sample runs in network and mount namespaces of its own, so that nothing of the host's network is touched or measured. Suite
//! `irq-load` uses the same wire, with the server of transactions farther away: [`Way::Nat`].

use super::{Bundle, Kind, Step, nat};
use crate::sample::quote;
use crate::sysbench::Test;

/// The guest's address on the wire and the host's, which is also the gateway that passt stands for.
const GUEST: &str = "10.0.5.2";
pub const HOST: &str = "10.0.5.1";
/// Their network.
pub const NETWORK: &str = "10.0.5.0/24";
/// The guest's NIC.
pub const MAC: &str = "52:54:00:00:05:02";
/// The tap; for passt it is the interface whose address it takes.
pub const TAP: &str = "lab0";
/// Port of the server of transactions; the next one is its other test's.
pub const PORT: u16 = 5301;

/// What the guest does before its work.
pub const SETUP: &str = "modprobe virtio_net;n=$(ls /sys/class/net|grep -v lo);ip addr add 10.0.5.2/24 dev $n;\
                         ip link set $n up;ip route add default via 10.0.5.1;";

/// The socket of a passt that is not the monitor's own, in a sample's scratch directory.
pub const PASST: &str = "passt.sock";

/// The guest's way to the servers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// They are on the host that its monitor runs on.
    Straight,
    /// That host forwards and masquerades; only the server of transactions is there. See [`nat`].
    Nat,
}

/// What a sample of this suite needs on the host.
pub struct Wire<'a> {
    /// The sample's directory.
    pub scratch: &'a str,
    /// The program of both ends of the transactions.
    pub agent: &'a str,
    /// The guest's root disk, which gets that program.
    pub disk: &'a str,
    /// The template names a tap.
    pub tap: bool,
    /// The template names the socket of a passt.
    pub passt: bool,
    /// The guest's way to the servers.
    pub way: Way,
}

impl Wire<'_> {
    /// Shell commands that make it, in the sample's own namespaces.
    pub fn prepare(&self) -> String {
        let wire = if self.tap {
            format!("ip tuntap add {TAP} mode tap vnet_hdr && ip addr add {HOST}/24 dev {TAP}")
        } else {
            // An address and a default route are what passt copies.
            format!("ip tuntap add {TAP} mode tap && ip addr add {GUEST}/24 dev {TAP}")
        };
        let route = if self.tap { String::new() } else { format!(" && ip route add default via {HOST}") };
        let passt = if self.passt {
            let socket = quote(&format!("{}/{PASST}", self.scratch));
            format!(" && chmod 777 {} && passt --quiet --one-off --mtu 65520 --socket {socket}", quote(self.scratch))
        } else {
            String::new()
        };
        let (agent, disk) = (self.agent, quote(self.disk));
        let servers = match self.way {
            Way::Straight => format!("iperf3 --server --daemon && {{ {agent} answer 0.0.0.0 {PORT} & }}"),
            Way::Nat => nat::prepare(agent),
        };
        format!(
            "ip link set lo up && {wire} && ip link set {TAP} up{route}{passt} && \
             printf 'cd /usr/bin\\nwrite {agent} tare-agent\\n' | debugfs -w -f - {disk} 2>&1 && {servers}"
        )
    }
}

/// The bundle of the suite.
pub fn bundles(scale: f64) -> Vec<Bundle> {
    let part = |full: f64, least: f64| (full * scale).round().max(least) as u64;
    let (mib, many, few) = (part(2048.0, 8.0), part(20_000.0, 50.0), part(4_000.0, 20.0));
    let step = |workload, mark, test, command| Step { workload, mark, test, command, after: "" };
    let stream = |way: &str| format!("iperf3 --client {HOST} --format k --interval 0 --bytes {mib}M{way}");
    let transact = |test: &str, count: u64| format!("tare-agent transact {test} {HOST} {PORT} {count}");
    let steps = vec![
        step("stream out", "out", Test::Iperf, stream("")),
        step("stream in", "in", Test::Iperf, stream(" --reverse")),
        step("TCP_RR", "rr", Test::Transact, transact("TCP_RR", many)),
        step("TCP_CRR", "crr", Test::Transact, transact("TCP_CRR", few)),
    ];
    vec![Bundle {
        name: "network",
        kind: Kind::Work(steps),
        memory_mib: 512,
        limit_seconds: 40 + (400.0 * scale) as u64,
        disk: None,
        net: Some(Way::Straight),
    }]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_wires_are_made_and_the_guest_knows_its_address() {
        let wire = Wire { scratch: "/s", agent: "/a", disk: "/d", tap: true, passt: false, way: Way::Straight };
        let tap = wire.prepare();
        assert!(tap.contains("addr add 10.0.5.1/24") && !tap.contains("passt") && !tap.contains("route"), "{tap}");
        assert!(tap.contains("iperf3 --server") && tap.ends_with("{ /a answer 0.0.0.0 5301 & }"), "{tap}");
        let user = Wire { tap: false, passt: true, ..wire }.prepare();
        assert!(user.contains("addr add 10.0.5.2/24") && user.contains("--socket '/s/passt.sock'"), "{user}");
        let nat = Wire { passt: false, way: Way::Nat, ..wire }.prepare();
        assert!(nat.contains("addr add 10.0.5.1/24") && nat.contains("masquerade") && !nat.contains("iperf3"), "{nat}");
        assert!(nat.ends_with("/a answer 10.0.6.2 5301 & }"), "{nat}");
        assert!(SETUP.contains(GUEST) && SETUP.contains(HOST));
        let text = format!("{:?}", bundles(0.1));
        for part in ["--bytes 205M", "--reverse", "TCP_RR 10.0.5.1 5301 2000", "TCP_CRR 10.0.5.1 5301 400"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
