//! Link matrices of machines, read from a file.
//!
//! ```json
//! {"dgx1v": {"n": 8, "nvlink": [[0, 1, …], …], "pcie": [["X", "PIX", …], …], "numa": [0, 0, …]}}
//! ```
//!
//! `nvlink` has the number of links of each pair, `pcie` the names of `nvidia-smi topo -m` (and
//! `PSB` for one board), `numa` the NUMA node of each GPU. Other fields are ignored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

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

/// Error of reading machines.
#[derive(Debug, thiserror::Error)]
pub enum MachinesError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The file does not have the expected format.
    #[error("not a list of machines: expected {{name: {{n, nvlink, pcie, numa}}}}")]
    Format(#[from] serde_json::Error),
    /// A machine is inconsistent.
    #[error("machine {machine}: {problem}")]
    Machine {
        /// Name of the machine.
        machine: String,
        /// Description of the error.
        problem: String,
    },
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
pub fn read(path: &Path) -> Result<Vec<Machine>, MachinesError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| MachinesError::Read { path: path.to_owned(), source })?;
    parse(&text)
}

/// Parses machines, sorted by name.
///
/// # Errors
/// Returns an error if the text does not have the expected format.
pub fn parse(text: &str) -> Result<Vec<Machine>, MachinesError> {
    let described: BTreeMap<String, MachineDescription> = serde_json::from_str(text)?;
    let machine = |(name, described): (String, MachineDescription)| match described.matrix() {
        Ok(matrix) => Ok(Machine { name, matrix }),
        Err(problem) => Err(MachinesError::Machine { machine: name, problem }),
    };
    described.into_iter().map(machine).collect()
}

impl MachineDescription {
    fn matrix(&self) -> Result<LinkMatrix, String> {
        let n = self.n;
        if n == 0 || n > DeviceSet::MAX {
            return Err(format!("n is {n}, but must be 1 to {}", DeviceSet::MAX));
        }
        let is_square =
            |lengths: &mut dyn Iterator<Item = usize>| lengths.filter(|&l| l == n).count() == n;
        if self.nvlink.len() != n || !is_square(&mut self.nvlink.iter().map(Vec::len)) {
            return Err(format!("nvlink is not {n} rows of {n}"));
        }
        if self.pcie.len() != n || !is_square(&mut self.pcie.iter().map(Vec::len)) {
            return Err(format!("pcie is not {n} rows of {n}"));
        }
        if self.numa.len() != n {
            return Err(format!("numa lists {} GPUs, not {n}", self.numa.len()));
        }
        let levels = self.levels()?;
        let level = |a: usize, b: usize| levels[a * n + b];
        for (a, b) in (0..n).flat_map(|a| (0..a).map(move |b| (b, a))) {
            if self.nvlink[a][b] != self.nvlink[b][a] || level(a, b) != level(b, a) {
                return Err(format!("links of GPUs {a} and {b} differ by direction"));
            }
        }
        let places: Vec<DeviceLocation> = (0..n).map(|gpu| self.place(gpu, &level)).collect();
        LinkMatrix::new(&places, |a, b| DeviceLinks {
            nvlinks: self.nvlink[a][b],
            pcie: level(a, b),
        })
        .map_err(|error| error.to_string())
    }

    /// Returns the PCIe level of each pair, row by row; the diagonal is unused.
    fn levels(&self) -> Result<Vec<PcieLevel>, String> {
        let cells = (0..self.n).flat_map(|a| (0..self.n).map(move |b| (a, b)));
        let level = |(a, b): (usize, usize)| {
            if a == b {
                return Ok(PcieLevel::Board);
            }
            self.pcie[a][b].parse::<PcieLevel>().map_err(|error| format!("pcie[{a}][{b}]: {error}"))
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
