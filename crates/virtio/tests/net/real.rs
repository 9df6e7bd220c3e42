// SPDX-License-Identifier: Apache-2.0
//! Real ends: the kernel's tap and passt, in a network namespace of the test's own. Each test runs itself again inside
//! `unshare`, and says so and passes where that, or passt, is not to be had.

use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;

use base::news::News;
use spec::{FromText, Mac};
use testkit::Buf;
use virtio::net::{Net, feature};

use crate::rig::*;

/// Runs the ignored test `name` in namespaces of its own. `false`: this host has none for us.
fn apart(name: &str) -> bool {
    let can = Command::new("unshare").args(["-rn", "ip", "link", "set", "lo", "up"]).stderr(Stdio::null()).status();
    if !can.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no network namespaces (or no `unshare` and `ip`) for this user");
        return false;
    }
    let test = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.arg("-rn").arg(test).args(["--ignored", "--exact", name, "--test-threads", "1"]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
    true
}

fn ip(args: &str) {
    let done = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {args}: {}", String::from_utf8_lossy(&done.stderr));
}

const MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
const HERE: [u8; 4] = [10, 9, 8, 2];
const THERE: [u8; 4] = [10, 9, 8, 1];

fn ethernet(to: [u8; 6], kind: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &MAC, &kind.to_be_bytes(), body].concat();
    frame.resize(frame.len().max(60), 0);
    frame
}

fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|c| u32::from(c[0]) << 8 | u32::from(c.get(1).copied().unwrap_or(0)));
    let mut sum: u32 = words.sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn ipv4(protocol: u8, from: [u8; 4], to: [u8; 4], body: &[u8]) -> Vec<u8> {
    let len = (20 + body.len()) as u16;
    let mut head = vec![0x45, 0];
    head.extend(len.to_be_bytes());
    head.extend([0, 1, 0, 0, 64, protocol, 0, 0]);
    head.extend(from);
    head.extend(to);
    let check = sum(&head).to_be_bytes();
    head[10..12].copy_from_slice(&check);
    head.extend(body);
    head
}

/// The next frame that `wanted` takes; others (the kernel's own chatter) are put aside.
fn next(rig: &mut Rig, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let mut found = None;
    rig.until("an answer", |rig| {
        for got in rig.received() {
            rig.post(&[2000]);
            if found.is_none() && wanted(&got.frame) {
                found = Some(got.frame);
            }
        }
        rig.kick(RX);
        found.is_some()
    });
    found.unwrap()
}

fn fill(rig: &mut Rig) {
    for _ in 0..64 {
        rig.post(&[2000]);
    }
    rig.kick(RX);
}

fn kind(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[12], frame[13]])
}

#[test]
fn a_tap_carries_packets_until_it_vanishes() {
    apart("real::tap_inside");
}

#[test]
#[ignore = "the one above runs it"]
fn tap_inside() {
    let spec = spec::Net::from_text("tap,tap=t0,mac=52:54:00:01:02:03").unwrap();
    let device = match Net::open(&spec, 0) {
        Ok(device) => device,
        Err(e) => return eprintln!("skipped: {e}"),
    };
    ip("addr add 10.9.8.1/24 dev t0");
    ip("link set t0 up");
    let mut rig = Rig::new(device, AGREED | feature::CSUM | feature::GUEST_CSUM | feature::CTRL_GUEST_OFFLOADS);
    assert_eq!(rig.config()[..6], MAC);
    fill(&mut rig);
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &MAC, &HERE, &[0; 6], &THERE].concat();
    rig.send(&ethernet([0xff; 6], 0x0806, &arp), &[12, 14]);
    rig.kick(TX);
    let answer = next(&mut rig, |f| kind(f) == 0x0806 && f[21] == 2);
    assert_eq!((&answer[..6], &answer[28..32]), (&MAC[..], &THERE[..]));
    let kernel: [u8; 6] = answer[6..12].try_into().unwrap();
    for len in [1usize, 56, 1400] {
        let mut echo = vec![8, 0, 0, 0, 0, 7, 0, 1];
        echo.extend(Rng::new(len as u64).bytes(len));
        let check = sum(&echo).to_be_bytes();
        echo[2..4].copy_from_slice(&check);
        rig.send(&ethernet(kernel, 0x0800, &ipv4(1, HERE, THERE, &echo)), &[20, 7]);
        rig.kick(TX);
        let back = next(&mut rig, |f| kind(f) == 0x0800 && f[23] == 1 && f[34] == 0);
        assert_eq!(back[42..][..len], echo[8..], "the kernel echoes what it was sent");
    }
    assert_eq!(rig.command(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]), 0);
    assert_eq!(rig.command(&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 0);
    assert_eq!(rig.command(&[5, 0, 0x80, 0, 0, 0, 0, 0, 0, 0]), 1, "only what was agreed on");
    ip("link del t0");
    rig.until("a link that is down", |rig| !rig.link_is_up());
    let news = rig.news.take();
    assert!(news.len() == 1 && news[0].contains("tap t0 is gone"), "{news:?}");
    rig.send(&[1; 60], &[]);
    rig.kick(TX);
    let mut back = 0;
    rig.until("the packets' end", |rig| {
        back += rig.sent().len();
        rig.queues[TX].free() == 256
    });
    rig.restart();
    assert!(!rig.link_is_up() && !rig.is_broken());
}

#[test]
fn a_tap_reads_large_packets_into_small_rings() {
    apart("real::large_inside");
}

/// A guest that takes large segments and has hardly a buffer: packets are read all the same, and merged when there is room.
#[test]
#[ignore = "the one above runs it"]
fn large_inside() {
    let spec = spec::Net::from_text("tap,tap=t0,mac=52:54:00:01:02:03").unwrap();
    let Ok(device) = Net::open(&spec, 0) else { return eprintln!("skipped: no taps") };
    ip("addr add 10.9.8.1/24 dev t0");
    ip("link set t0 up");
    ip("neigh add 10.9.8.2 lladdr 52:54:00:01:02:03 dev t0");
    let offloads = feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_TSO6;
    let mut rig = Rig::new(device, AGREED | offloads);
    let socket = std::net::UdpSocket::bind("10.9.8.1:0").unwrap();
    for round in 0..30u8 {
        let body = Rng::new(u64::from(round) + 1).bytes(1000);
        socket.send_to(&body, "10.9.8.2:9").unwrap();
        let mut found = None;
        rig.until("the packet", |rig| {
            if rig.queues[RX].free() > 240 {
                rig.post(&[300]);
            }
            rig.kick(RX);
            found = rig.received().into_iter().find(|got| kind(&got.frame) == 0x0800 && got.frame[23] == 17);
            found.is_some()
        });
        assert!(found.unwrap().frame.ends_with(&body));
    }
}

#[test]
fn a_tap_spreads_packets_over_the_pairs_in_use() {
    apart("real::pairs_inside");
}

/// One UDP packet of each of many flows, to a guest that answers nothing; gives how many came to each pair.
fn flows(rig: &mut Rig, pairs: usize) -> Vec<usize> {
    for pair in 0..pairs {
        while rig.queues[2 * pair].free() > 0 {
            let at = 0x40_0000 + pair as u64 * 0x20_0000 + rig.queues[2 * pair].free() as u64 * 2048;
            rig.queues[2 * pair].send(&[Buf::write(at, 2000)]);
        }
        rig.kick(2 * pair);
    }
    let start = rig.device.stats().read().received;
    for port in 0..100u16 {
        let socket = std::net::UdpSocket::bind(("10.9.8.1", 20000 + port)).unwrap();
        socket.send_to(b"flow", ("10.9.8.2", 30000 + port)).unwrap();
    }
    let mut seen = vec![0; pairs];
    rig.until("a hundred packets", |rig| rig.device.stats().read().received >= start + 100);
    for (pair, seen) in seen.iter_mut().enumerate() {
        while rig.queues[2 * pair].used().is_some() {
            *seen += 1;
        }
    }
    seen
}

#[test]
#[ignore = "the one above runs it"]
fn pairs_inside() {
    let spec = spec::Net::from_text("tap=t0,mac=52:54:00:01:02:03,queues=3").unwrap();
    let Ok(device) = Net::open(&spec, 0) else { return eprintln!("skipped: no taps") };
    ip("addr add 10.9.8.1/24 dev t0");
    ip("link set t0 up");
    ip("neigh add 10.9.8.2 lladdr 52:54:00:01:02:03 dev t0");
    let mut rig = Rig::new(device, AGREED | feature::MQ);
    assert_eq!(rig.config()[8..10], [3, 0]);
    assert_eq!(flows(&mut rig, 3)[1..], [0, 0], "one pair after a reset");
    assert_eq!(rig.command(&[4, 0, 3, 0]), 0);
    let seen = flows(&mut rig, 3);
    assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
    assert_eq!(rig.command(&[4, 0, 2, 0]), 0);
    assert_eq!(flows(&mut rig, 3)[2], 0);
    for bad in [&[4, 0, 0, 0][..], &[4, 0, 4, 0], &[4, 0, 0xff, 0xff], &[4, 0, 1], &[4, 1, 1, 0]] {
        assert_eq!(rig.command(bad), 1, "{bad:?}");
    }
    rig.restart();
    assert_eq!(flows(&mut rig, 3)[1..], [0, 0], "one pair after a reset");
    assert_eq!(rig.command(&[4, 0, 3, 0]), 0);
    ip("link del t0");
    rig.until("a link that is down", |rig| !rig.link_is_up());
    let news = rig.news.take();
    assert!(news.len() == 1 && news[0].contains("tap t0 is gone"), "said once: {news:?}");
    assert!(!rig.is_broken());
}

#[test]
fn vhost_net_carries_packets_until_the_tap_vanishes() {
    if !std::path::Path::new("/dev/vhost-net").exists() {
        return eprintln!("skipped: this host has no /dev/vhost-net");
    }
    apart("real::vhost_inside");
}

/// An echo through the host's kernel, of so many bytes.
fn echo(rig: &mut Rig, kernel: [u8; 6], len: usize) {
    let mut echo = vec![8, 0, 0, 0, 0, 7, 0, 1];
    echo.extend(Rng::new(len as u64).bytes(len));
    let check = sum(&echo).to_be_bytes();
    echo[2..4].copy_from_slice(&check);
    rig.send(&ethernet(kernel, 0x0800, &ipv4(1, HERE, THERE, &echo)), &[12, 14, 20]);
    rig.kick(TX);
    let back = next(rig, |f| kind(f) == 0x0800 && f[23] == 1 && f[34] == 0);
    assert_eq!(back[42..][..len], echo[8..], "the kernel echoes what it was sent");
    rig.sent();
}

fn kernel_address() -> [u8; 6] {
    let text = std::fs::read_to_string("/sys/class/net/t0/address").or_else(|_| {
        let out = Command::new("ip").args(["-o", "link", "show", "t0"]).output()?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let (_, rest) = text.split_once("link/ether ").ok_or(std::io::ErrorKind::NotFound)?;
        Ok::<_, std::io::Error>(rest.split(' ').next().unwrap_or_default().to_owned())
    });
    text.unwrap().trim().parse::<Mac>().unwrap().0
}

#[test]
#[ignore = "the one above runs it"]
fn vhost_inside() {
    let spec = spec::Net::from_text("tap=t0,vhost=on,mac=52:54:00:01:02:03").unwrap();
    let news = Arc::new(News::new().unwrap());
    let device = Net::open(&spec, 0).unwrap().reporting_to(&news);
    assert_eq!(news.take(), [""; 0], "vhost-net can be opened");
    ip("addr add 10.9.8.1/24 dev t0");
    ip("link set t0 up");
    ip("neigh add 10.9.8.2 lladdr 52:54:00:01:02:03 dev t0");
    let kernel = kernel_address();
    let mut rig = Rig::new(device, AGREED);
    for round in 0..3 {
        fill(&mut rig);
        for len in [1, 56, 1400] {
            echo(&mut rig, kernel, len);
        }
        let counts = rig.device.stats().read();
        assert_eq!((counts.faults, counts.kicks > 10), (0, false), "no packet comes this way: {counts:?}");
        assert!(rig.irq.pulses() > 0, "the kernel's signals are passed on");
        assert_eq!(rig.news.take(), [""; 0], "round {round}");
        rig.restart();
    }
    // A ring that the kernel does not like stops the device and nothing else.
    rig.queues[TX].set_desc(0, u64::MAX - 8, 64, 0, 0);
    rig.queues[TX].publish(0);
    rig.kick(TX);
    rig.until("needs reset", |rig| rig.is_broken());
    let mut rig = Rig::new(rig.into_device(), AGREED);
    fill(&mut rig);
    echo(&mut rig, kernel, 99);
    ip("link del t0");
    rig.until("a link that is down", |rig| !rig.link_is_up());
    let news = rig.news.take();
    assert!(news.len() == 1 && news[0].contains("tap t0 is gone"), "{news:?}");
    // The worker has the rings again, where the kernel left them.
    for _ in 0..10 {
        rig.send(&[1; 60], &[]);
    }
    rig.kick(TX);
    let mut back = 0;
    rig.until("the packets' end", |rig| {
        back += rig.sent().len();
        back == 10
    });
    assert!(!rig.is_broken());
}

#[test]
fn passt_gives_an_address_and_its_end_takes_the_link_down() {
    if Command::new("passt").arg("--version").output().is_err() {
        return eprintln!("skipped: passt is not installed");
    }
    apart("real::passt_inside");
}

#[test]
#[ignore = "the one above runs it"]
fn passt_inside() {
    // An address and a default route are what passt copies.
    ip("tuntap add u0 mode tap");
    ip("addr add 192.0.2.7/24 dev u0");
    ip("link set u0 up");
    ip("route add default via 192.0.2.1");
    let spec = spec::Net { mac: Some(Mac(MAC)), ..spec::Net::default() };
    let mut rig = Rig::new(Net::open(&spec, 0).unwrap(), AGREED);
    fill(&mut rig);
    // DHCPDISCOVER.
    let mut dhcp = vec![1, 1, 6, 0, 9, 9, 9, 9];
    dhcp.resize(28, 0);
    dhcp.extend(MAC);
    dhcp.resize(236, 0);
    dhcp.extend([0x63, 0x82, 0x53, 0x63, 53, 1, 1, 255]);
    dhcp.resize(300, 0);
    let mut udp = vec![0, 68, 0, 67];
    udp.extend((8 + dhcp.len() as u16).to_be_bytes());
    udp.extend([0, 0]);
    udp.extend(dhcp);
    rig.send(&ethernet([0xff; 6], 0x0800, &ipv4(17, [0; 4], [255; 4], &udp)), &[12, 14, 20]);
    rig.kick(TX);
    let offer = next(&mut rig, |f| kind(f) == 0x0800 && f[23] == 17 && f[34..38] == [0, 67, 0, 68]);
    assert_eq!(offer[42 + 16..42 + 20], [192, 0, 2, 7], "the host's own address");
    let pids = Command::new("pgrep").args(["-P", &std::process::id().to_string(), "passt"]).output().unwrap();
    let pid = String::from_utf8_lossy(&pids.stdout).trim().to_owned();
    assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success(), "{pid}");
    rig.until("a link that is down", |rig| !rig.link_is_up());
    let news = rig.news.take();
    assert!(news.len() == 1 && news[0].contains("passt ended"), "{news:?}");
}

#[test]
fn what_can_not_be_opened_says_why() {
    let says = |text: &str| Net::open(&spec::Net::from_text(text).unwrap(), 3).err().unwrap().to_string();
    assert_eq!(says("tap,fd=987654"), "descriptor 987654 is not open: net3; open it in the program that starts tare");
    let (socket, _peer) = UnixStream::pair().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    assert!(says(&format!("tap,fd={fd}")).starts_with(&format!("descriptor {fd} is not a tap: net3")));
    assert!(says("tap,fd=9,vhostfd=9").starts_with("descriptor 9 is not"), "neither a tap nor vhost-net");
    let file = std::fs::File::open("/dev/null").unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    assert!(says(&format!("user,fd={fd}")).contains("is not a connected stream socket: net3"));
}
