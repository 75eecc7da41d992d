//! Looks at a fake world, lays out what a machine with its GPUs has on disk, and makes things
//! happen to it.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};
use tessera_fake_world::control::{ControlFile, EventKind, ForeignProcess, RecoveryAction};
use tessera_fake_world::tree::{self, Libraries};
use tessera_fake_world::{Gpu, NvLinkEnd, World};

/// A machine with GPUs that are not there.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Reads a world, says what is in it, and fails if it is not possible.
    Check {
        /// The world file.
        world: PathBuf,
    },
    /// Writes the PCI devices as the kernel shows them.
    Sysfs {
        /// The world file.
        world: PathBuf,
        /// Where to; stands for /sys.
        directory: PathBuf,
    },
    /// Lays out the files of an installed NVIDIA driver, with the fake libraries and the world in
    /// it.
    DriverRoot {
        /// The world file.
        world: PathBuf,
        /// The fake libnvidia-ml.so.1.
        nvml: PathBuf,
        /// The fake libcuda.so.1.
        cuda: PathBuf,
        /// Where to; stands for /.
        directory: PathBuf,
    },
    /// Makes something happen to a GPU, by editing control.yaml beside the world.
    Control {
        /// The world file that the libraries use.
        world: PathBuf,
        #[command(subcommand)]
        happening: Happening,
    },
}

#[derive(Debug, Subcommand)]
enum Happening {
    /// The GPU falls off the bus.
    Lose {
        /// Index or UUID.
        gpu: String,
    },
    /// Everything the control file says about the GPU is undone.
    Heal {
        /// Index or UUID.
        gpu: String,
    },
    /// The kernel driver reports an XID.
    Xid {
        /// Index or UUID.
        gpu: String,
        /// Its number.
        code: u64,
        /// What the kernel driver then says has to be done: none, gpu-reset, node-reboot,
        /// drain-p2p or drain-and-reset.
        #[arg(long, default_value = "none", value_parser = recovery_action)]
        recovery: RecoveryAction,
    },
    /// The GPU is reset: it answers again, and nothing is to be done any more.
    Reset {
        /// Index or UUID.
        gpu: String,
    },
    /// The GPU hangs: calls on it fail with UNKNOWN.
    Hang {
        /// Index or UUID.
        gpu: String,
    },
    /// A double-bit ECC error: the counter rises and the event is delivered.
    Ecc {
        /// Index or UUID.
        gpu: String,
    },
    /// A process outside the world holds memory.
    Process {
        /// Index or UUID.
        gpu: String,
        /// Its process id.
        pid: u32,
        /// MiB; 0 = it has gone.
        mib: u64,
    },
}

fn recovery_action(word: &str) -> Result<RecoveryAction, String> {
    let known = || RecoveryAction::ALL.map(RecoveryAction::word).join(", ");
    RecoveryAction::by_word(word)
        .ok_or_else(|| format!("no such recovery action; known are {}", known()))
}

fn main() -> anyhow::Result<()> {
    let Args { command } = Args::parse();
    match command {
        Command::Check { world } => {
            print(&World::load(&world)?);
            Ok(())
        }
        Command::Sysfs { world, directory } => {
            Ok(tree::write_sysfs(&World::load(&world)?, &directory)?)
        }
        Command::DriverRoot { world, nvml, cuda, directory } => {
            let libraries = Libraries { nvml, cuda: Some(cuda) };
            Ok(tree::write_driver_root(&world, &World::load(&world)?, &libraries, &directory)?)
        }
        Command::Control { world, happening } => happen(&world, happening),
    }
}

fn print(world: &World) {
    println!("driver {}, CUDA {}", world.driver.version, world.driver.cuda);
    for gpu in &world.gpus {
        let node = gpu.numa_node.map_or_else(|| "-".to_owned(), |node| node.to_string());
        println!(
            "{:2}  {}  {}  {} MiB  {}  {}  NUMA {node}{}",
            gpu.index,
            gpu.uuid,
            gpu.model.name,
            gpu.model.memory_mib,
            gpu.pci,
            gpu.pcie_root,
            if gpu.mig { "  MIG" } else { "" },
        );
    }
    for gpu in &world.gpus {
        let cells = world.gpus.iter().map(|other| cell(world, gpu, other));
        println!("{:2} {}", gpu.index, cells.collect::<String>());
    }
}

/// How two GPUs are joined, as `nvidia-smi topo -m` writes it.
fn cell(world: &World, gpu: &Gpu, other: &Gpu) -> String {
    let switched =
        gpu.links.iter().filter(|link| matches!(link.remote, NvLinkEnd::Switch(_))).count();
    let far = other.links.iter().any(|link| matches!(link.remote, NvLinkEnd::Switch(_)));
    let word = match world.direct_links(gpu.index, other.index) {
        0 if gpu.index != other.index && switched > 0 && far => format!("NV{switched}"),
        0 => world.pcie_level(gpu.index, other.index).word().to_owned(),
        count => format!("NV{count}"),
    };
    format!("{word:>6}")
}

fn happen(world_file: &std::path::Path, happening: Happening) -> anyhow::Result<()> {
    let world = World::load(world_file)?;
    let control = ControlFile::new(world_file.with_file_name("control.yaml"));
    let find = |gpu: &str| {
        let by_index = || gpu.parse::<usize>().ok().and_then(|index| world.gpus.get(index));
        match world.gpu_by_uuid(gpu).or_else(by_index) {
            Some(gpu) => Ok(gpu.uuid.clone()),
            None => bail!("no GPU `{gpu}` in {}", world_file.display()),
        }
    };
    let written = match happening {
        Happening::Lose { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.gpu_mut(&uuid).lost = true)
        }
        Happening::Heal { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| {
                control.gpus.remove(&uuid);
            })
        }
        Happening::Xid { gpu, code, recovery } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.report_xid(&uuid, code, recovery))
        }
        Happening::Reset { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.reset(&uuid))
        }
        Happening::Hang { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.gpu_mut(&uuid).hung = true)
        }
        Happening::Ecc { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| {
                control.gpu_mut(&uuid).ecc_uncorrected += 1;
                control.push_event(&uuid, EventKind::EccDoubleBit);
            })
        }
        Happening::Process { gpu, pid, mib } => {
            let uuid = find(&gpu)?;
            control.update(|control| {
                let processes = &mut control.gpu_mut(&uuid).processes;
                processes.retain(|process| process.pid != pid);
                if mib > 0 {
                    processes.push(ForeignProcess { pid, used_mib: mib, name: String::new() });
                }
            })
        }
    };
    written.with_context(|| format!("cannot edit {}", control.path().display()))
}
