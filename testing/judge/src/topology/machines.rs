//! Link matrices of machines, from a file.
//!
//! ```json
//! {"dgx1v": {"n": 8, "nvlink": [[0, 1, …], …], "pcie": [["X", "PIX", …], …], "numa": [0, 0, …]}}
//! ```
//!
//! `nvlink` counts the links of each pair, `pcie` has the words of `nvidia-smi topo -m` (and `PSB`
//! for one board), `numa` the NUMA node of each GPU. Other fields are for people.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tessera_allocator::topology::{DeviceSet, LinkMatrix, Pair, Place};
use tessera_api::gpu::PcieLevel;

/// A machine of the file.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Its name there.
    pub name: String,
    /// How its GPUs are joined.
    pub matrix: LinkMatrix,
}

/// Why a file has no machines.
#[derive(Debug, thiserror::Error)]
pub enum MachinesError {
    /// It cannot be read.
    #[error("{path} cannot be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not of the format.
    #[error("not a list of machines: {{name: {{n, nvlink, pcie, numa}}}}")]
    Format(#[from] serde_json::Error),
    /// A machine contradicts itself.
    #[error("machine {machine}: {problem}")]
    Machine {
        /// Its name.
        machine: String,
        /// What is wrong, and where.
        problem: String,
    },
}

#[derive(Deserialize)]
struct Described {
    n: usize,
    nvlink: Vec<Vec<u32>>,
    pcie: Vec<Vec<String>>,
    numa: Vec<i64>,
}

/// The machines of a file, by name.
///
/// # Errors
/// The file is not there or not of the format.
pub fn read(path: &Path) -> Result<Vec<Machine>, MachinesError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| MachinesError::Read { path: path.to_owned(), source })?;
    parse(&text)
}

/// The machines of a text of that format.
///
/// # Errors
/// It is not of the format.
pub fn parse(text: &str) -> Result<Vec<Machine>, MachinesError> {
    let described: BTreeMap<String, Described> = serde_json::from_str(text)?;
    let machine = |(name, described): (String, Described)| match described.matrix() {
        Ok(matrix) => Ok(Machine { name, matrix }),
        Err(problem) => Err(MachinesError::Machine { machine: name, problem }),
    };
    described.into_iter().map(machine).collect()
}

impl Described {
    fn matrix(&self) -> Result<LinkMatrix, String> {
        let n = self.n;
        if n == 0 || n > DeviceSet::MAX {
            return Err(format!("n is {n}; it must be 1 to {}", DeviceSet::MAX));
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
                return Err(format!(
                    "GPUs {a} and {b} are joined differently in the two directions"
                ));
            }
        }
        let places: Vec<Place> = (0..n).map(|gpu| self.place(gpu, &level)).collect();
        LinkMatrix::new(&places, |a, b| Pair { nvlinks: self.nvlink[a][b], pcie: level(a, b) })
            .map_err(|error| error.to_string())
    }

    /// The PCIe level of each pair, row by row; the diagonal says nothing.
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

    /// GPUs that are joined across one host bridge or closer hang on one root complex; the lowest
    /// of them numbers it.
    fn place(&self, gpu: usize, level: &impl Fn(usize, usize) -> PcieLevel) -> Place {
        let root =
            (0..self.n).find(|&other| level(gpu, other) >= PcieLevel::HostBridge).unwrap_or(gpu);
        Place { pcie_root: Some(root as u32), numa_node: u32::try_from(self.numa[gpu]).ok() }
    }
}
