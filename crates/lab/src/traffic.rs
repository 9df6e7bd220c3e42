// SPDX-License-Identifier: Apache-2.0
//! Reads what iperf3 and the agent's `transact` print. As with sysbench, a figure that is not in the text is an error. Called by
//! `sysbench::figures`.

use anyhow::{Context, Result, bail};

use crate::report::{Better, Figure};

/// The figures of a stream: what arrived. Its events are MiB.
pub fn stream(text: &str) -> Result<Vec<Figure>> {
    if let Some(line) = text.lines().find(|line| line.starts_with("iperf3: error")) {
        bail!("iperf3 failed: {}", line.trim_end());
    }
    let line = text.lines().find(|line| line.trim_end().ends_with("receiver"));
    let line = line.context("no line of the receiver in iperf3's output")?;
    let rate = before(line, "Kbits/sec")? / 1000.0;
    let units = [("KBytes", 1.0 / 1024.0), ("MBytes", 1.0), ("GBytes", 1024.0)];
    let mib = units.into_iter().find_map(|(unit, mib)| Some(before(line, unit).ok()? * mib));
    let mib = mib.context("iperf3's line of results has no amount")?;
    Ok(vec![Figure::new("rate", "Mbit/s", Better::Higher, rate), Figure::new("events", "", Better::Higher, mib)])
}

/// The number in front of `unit`.
fn before(line: &str, unit: &str) -> Result<f64> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| *word == unit).context("iperf3's line of results lacks a unit")?;
    let number = at.checked_sub(1).and_then(|at| words.get(at)).and_then(|word| word.parse().ok());
    number.filter(|number: &f64| number.is_finite() && *number >= 0.0).context("iperf3's line of results has no number")
}

/// The figures of transactions.
pub fn transactions(text: &str) -> Result<Vec<Figure>> {
    if let Some(line) = text.lines().find(|line| line.starts_with("tare-agent:")) {
        bail!("transact failed: {}", line.trim_end());
    }
    let value = |label: &str| -> Result<f64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(label)).with_context(|| format!("no '{label}'"))?;
        let number: f64 = rest.trim().parse().with_context(|| format!("no number after '{label}'"))?;
        if number.is_finite() && number > 0.0 { Ok(number) } else { bail!("no number after '{label}'") }
    };
    let (count, seconds) = (value("transactions:")?, value("seconds:")?);
    Ok(vec![
        Figure::new("transactions per second", "1/s", Better::Higher, count / seconds),
        Figure::new("events", "", Better::Higher, count),
    ])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const IPERF: &str = "Connecting to host 10.0.5.1, port 5201\n\
        [  5] local 10.0.5.2 port 40000 connected to 10.0.5.1 port 5201\n\
        [ ID] Interval           Transfer     Bitrate         Retr\n\
        [  5]   0.00-2.00   sec   250 MBytes  1048576 Kbits/sec    0             sender\n\
        [  5]   0.00-2.00   sec   250 MBytes  1048000 Kbits/sec                  receiver\r\n\niperf Done.\n";

    #[test]
    fn what_arrived_counts() {
        let figures = stream(IPERF).unwrap();
        assert_eq!(figures[0], Figure::new("rate", "Mbit/s", Better::Higher, 1048.0));
        assert_eq!(figures[1].value, 250.0);
        assert_eq!(stream(&IPERF.replace("250 MBytes", "1.5 GBytes")).unwrap()[1].value, 1536.0);
    }

    #[test]
    fn transactions_by_the_second() {
        let figures = transactions("transactions: 2000\r\nseconds: 0.500000\r\n").unwrap();
        assert_eq!(figures[0], Figure::new("transactions per second", "1/s", Better::Higher, 4000.0));
        assert_eq!(figures[1].value, 2000.0);
    }

    #[test]
    fn output_without_results_is_an_error() {
        let says = |result: Result<Vec<Figure>>| result.unwrap_err().to_string();
        assert!(says(stream("iperf3: error - unable to connect to server\n")).contains("unable to connect"));
        assert!(says(stream("")).contains("no line of the receiver"));
        assert!(says(stream(&IPERF.replace("1048000", "nan"))).contains("no number"));
        assert!(says(transactions("tare-agent: Connection refused\n")).contains("refused"));
        assert!(says(transactions("transactions: 5\n")).contains("seconds:"));
        assert!(says(transactions("transactions: 5\nseconds: 0\n")).contains("no number"));
    }
}
