// SPDX-License-Identifier: Apache-2.0
//! `tare-lab host` alone.
#[path = "../src/host/mod.rs"]
#[allow(dead_code)]
mod host;

#[derive(clap::Parser)]
struct Args {
    #[command(subcommand)]
    verb: host::cli::Verb,
}

fn main() -> std::process::ExitCode {
    let args = <Args as clap::Parser>::parse();
    match host::cli::run(args.verb) {
        Ok(code) => code.into(),
        Err(error) => {
            eprintln!("tare-lab: {error:#}");
            1.into()
        }
    }
}
