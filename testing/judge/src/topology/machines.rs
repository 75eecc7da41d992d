//! Link matrices of machines, read from a file.
//!
//! ```json
//! {"dgx1v": {"n": 8, "nvlink": [[0, 1, …], …], "pcie": [["X", "PIX", …], …], "numa": [0, 0, …]}}
//! ```
//!
//! `nvlink` has the number of links of each pair, `pcie` the names of `nvidia-smi topo -m` (and
//! `PSB` for one board), `numa` the NUMA node of each GPU. Other fields are ignored.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use tessera_allocator::topology::{DeviceLinks, DeviceLocation, DeviceSet, LinkMatrix};
use tessera_api::gpu::PcieLevel;

/// A machine of the file.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Name in the file.
    pub name: String,
    /// Link matrix of its GPUs.
    pub matrix: LinkMatrix,
}

#[derive(Deserialize)]
struct MachineDescription {
    n: usize,
    nvlink: Vec<Vec<u32>>,
    pcie: Vec<Vec<String>>,
    numa: Vec<i64>,
}

/// Reads the machines of a file, sorted by name.
///
/// # Errors
/// Returns an error if the file cannot be read or does not have the expected format.
pub fn read(path: &Path) -> anyhow::Result<Vec<Machine>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text)
}

/// Parses machines, sorted by name.
///
/// # Errors
/// Returns an error if the text does not have the expected format.
pub fn parse(text: &str) -> anyhow::Result<Vec<Machine>> {
    let described: BTreeMap<String, MachineDescription> = serde_json::from_str(text)
        .context("not a list of machines: expected {name: {n, nvlink, pcie, numa}}")?;
    let machine = |(name, described): (String, MachineDescription)| {
        let matrix = described.matrix().with_context(|| format!("machine {name}"))?;
        Ok(Machine { name, matrix })
    };
    described.into_iter().map(machine).collect()
}

impl MachineDescription {
    fn matrix(&self) -> anyhow::Result<LinkMatrix> {
        let n = self.n;
        let max = DeviceSet::MAX;
        ensure!((1..=max).contains(&n), "n is {n}, but must be 1 to {max}");
        ensure!(is_square(&self.nvlink, n), "nvlink is not {n} rows of {n}");
        ensure!(is_square(&self.pcie, n), "pcie is not {n} rows of {n}");
        ensure!(self.numa.len() == n, "numa lists {} GPUs, not {n}", self.numa.len());
        let levels = self.levels()?;
        let level = |a: usize, b: usize| levels[a * n + b];
        for (a, b) in (0..n).flat_map(|a| (0..a).map(move |b| (b, a))) {
            let is_symmetric = self.nvlink[a][b] == self.nvlink[b][a] && level(a, b) == level(b, a);
            ensure!(is_symmetric, "links of GPUs {a} and {b} differ by direction");
        }
        let places: Vec<DeviceLocation> = (0..n).map(|gpu| self.place(gpu, &level)).collect();
        Ok(LinkMatrix::new(&places, |a, b| DeviceLinks {
            nvlinks: self.nvlink[a][b],
            pcie: level(a, b),
        })?)
    }

    /// Returns the PCIe level of each pair, row by row; the diagonal is unused.
    fn levels(&self) -> anyhow::Result<Vec<PcieLevel>> {
        let cells = (0..self.n).flat_map(|a| (0..self.n).map(move |b| (a, b)));
        let level = |(a, b): (usize, usize)| {
            if a == b {
                return Ok(PcieLevel::Board);
            }
            self.pcie[a][b].parse().with_context(|| format!("pcie[{a}][{b}]"))
        };
        cells.map(level).collect()
    }

    /// Returns the location of a GPU. GPUs that share a host bridge or are closer have the same
    /// root complex, which is numbered by the lowest of them.
    fn place(&self, gpu: usize, level: &impl Fn(usize, usize) -> PcieLevel) -> DeviceLocation {
        let root =
            (0..self.n).find(|&other| level(gpu, other) >= PcieLevel::HostBridge).unwrap_or(gpu);
        DeviceLocation {
            pcie_root: Some(root as u32),
            numa_node: u32::try_from(self.numa[gpu]).ok(),
        }
    }
}

fn is_square<T>(rows: &[Vec<T>], n: usize) -> bool {
    rows.len() == n && rows.iter().all(|row| row.len() == n)
}
