// SPDX-License-Identifier: Apache-2.0
//! A place without machines: answers each script with a canned report and remembers what it was asked.

use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Result, bail};

use super::{Facts, Paths, Place};

type Answer = Box<dyn Fn(usize, &str) -> Result<String> + Sync>;

/// The mock.
pub struct Mock {
    paths: Paths,
    answer: Answer,
    /// Scripts in the order they came.
    pub asked: Mutex<Vec<String>>,
}

impl Mock {
    /// `answer` gets the call's number and its script.
    pub fn new(answer: impl Fn(usize, &str) -> Result<String> + Sync + 'static) -> Self {
        let paths = Paths {
            kernel: "/k".into(),
            initrd: "/i".into(),
            console_initrd: "/ci".into(),
            disk: "/d".into(),
            copy_disk: false,
            root: "/dev/vda".into(),
            work: "/w".into(),
            tare: "/bin/tare".into(),
            watch: "/bin/watch".into(),
        };
        Self { paths, answer: Box::new(answer), asked: Mutex::default() }
    }
}

impl Place for Mock {
    fn facts(&self) -> Facts {
        Facts { place: "mock", time: "made up", ..Facts::default() }
    }

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn lanes(&self) -> usize {
        1
    }

    fn cpus(&self) -> u32 {
        1
    }

    fn run(&self, script: &str, _: Duration) -> Result<String> {
        let Ok(mut asked) = self.asked.lock() else { bail!("poisoned") };
        asked.push(script.to_owned());
        (self.answer)(asked.len() - 1, script)
    }
}
