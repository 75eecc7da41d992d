//! Checks fake worlds, creates the files of their machines, and edits their control files.

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use clap::{Parser, Subcommand};
use tessera_fake_world::control::{ControlFile, EventKind, ForeignProcess, RecoveryAction};
use tessera_fake_world::mig::{GpuInstance, MigError, NodeMig};
use tessera_fake_world::tree::{self, Libraries};
use tessera_fake_world::{Gpu, NvLinkEnd, World};

/// Manages fake machines with GPUs.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Validate a world and print its content.
    Check {
        /// The world file.
        world: PathBuf,
    },
    /// Write the PCI devices in the layout of sysfs.
    Sysfs {
        /// The world file.
        world: PathBuf,
        /// Target directory, in place of /sys.
        directory: PathBuf,
    },
    /// Write the files of an installed NVIDIA driver, with the fake libraries and the world.
    DriverRoot {
        /// The world file.
        world: PathBuf,
        /// The fake libnvidia-ml.so.1.
        nvml: PathBuf,
        /// The fake libcuda.so.1.
        cuda: PathBuf,
        /// Target directory, in place of /.
        directory: PathBuf,
    },
    /// Change the condition of a GPU in control.yaml beside the world.
    Control {
        /// The world file that the libraries use.
        world: PathBuf,
        #[command(subcommand)]
        change: ConditionChange,
    },
}

#[derive(Debug, Subcommand)]
enum ConditionChange {
    /// Let the GPU fall off the bus.
    Lose {
        /// Index or UUID.
        gpu: String,
    },
    /// Remove all entries of the GPU from the control file.
    Heal {
        /// Index or UUID.
        gpu: String,
    },
    /// Report an XID of the kernel driver.
    Xid {
        /// Index or UUID.
        gpu: String,
        /// XID number.
        code: u64,
        /// Recovery action of the kernel driver: none, gpu-reset, node-reboot, drain-p2p or
        /// drain-and-reset.
        #[arg(long, default_value = "none", value_parser = recovery_action)]
        recovery: RecoveryAction,
    },
    /// Reset the GPU: it answers again and needs no recovery action.
    Reset {
        /// Index or UUID.
        gpu: String,
    },
    /// Let the GPU hang: calls on it fail with UNKNOWN.
    Hang {
        /// Index or UUID.
        gpu: String,
    },
    /// Report a double-bit ECC error: increment the counter and deliver the event.
    Ecc {
        /// Index or UUID.
        gpu: String,
    },
    /// Set the utilization of the GPU.
    Busy {
        /// Index or UUID.
        gpu: String,
        /// Percent of time with a running kernel.
        percent: u32,
    },
    /// Set MIG mode, as an administrator does. All instances must be destroyed before.
    Mig {
        /// Index or UUID.
        gpu: String,
        /// on or off.
        #[arg(action = clap::ArgAction::Set, value_parser = on_or_off)]
        mode: bool,
    },
    /// Create a MIG device, as an administrator does.
    MigCreate {
        /// Index or UUID.
        gpu: String,
        /// ID of the profile, such as 19.
        profile: u32,
        /// First memory slice.
        start: u32,
    },
    /// Destroy all MIG instances of a GPU, as an administrator does.
    MigDestroy {
        /// Index or UUID.
        gpu: String,
    },
    /// Set the memory of a process outside the world.
    Process {
        /// Index or UUID.
        gpu: String,
        /// PID.
        pid: u32,
        /// MiB; 0 removes the process.
        mib: u64,
    },
}

fn recovery_action(name: &str) -> Result<RecoveryAction, String> {
    let known = || RecoveryAction::ALL.map(RecoveryAction::name).join(", ");
    RecoveryAction::from_name(name)
        .ok_or_else(|| format!("unknown recovery action: expected one of {}", known()))
}

fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off".to_owned()),
    }
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
        Command::Control { world, change } => apply(&world, change),
    }
}

/// Returns an error if a process uses an instance.
fn ensure_idle(instances: &[GpuInstance]) -> Result<(), MigError> {
    let is_busy = instances.iter().flat_map(|instance| &instance.compute).any(|c| c.busy);
    if is_busy { Err(MigError::InUse) } else { Ok(()) }
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

/// Returns the link of two GPUs in the notation of `nvidia-smi topo -m`.
fn cell(world: &World, gpu: &Gpu, other: &Gpu) -> String {
    let switched =
        gpu.links.iter().filter(|link| matches!(link.remote, NvLinkEnd::Switch(_))).count();
    let far = other.links.iter().any(|link| matches!(link.remote, NvLinkEnd::Switch(_)));
    let word = match world.direct_links(gpu.index, other.index) {
        0 if gpu.index != other.index && switched > 0 && far => format!("NV{switched}"),
        0 => world.pcie_level(gpu.index, other.index).name().to_owned(),
        count => format!("NV{count}"),
    };
    format!("{word:>6}")
}

fn apply(world_file: &std::path::Path, change: ConditionChange) -> anyhow::Result<()> {
    let world = World::load(world_file)?;
    let control = ControlFile::new(world_file.with_file_name("control.yaml"));
    let find = |gpu: &str| {
        let by_index = || gpu.parse::<usize>().ok().and_then(|index| world.gpus.get(index));
        match world.gpu_by_uuid(gpu).or_else(by_index) {
            Some(gpu) => Ok(gpu.uuid.clone()),
            None => bail!("no GPU `{gpu}` in {}", world_file.display()),
        }
    };
    let written = match change {
        ConditionChange::Lose { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.gpu_mut(&uuid).lost = true)
        }
        ConditionChange::Heal { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| {
                control.gpus.remove(&uuid);
            })
        }
        ConditionChange::Xid { gpu, code, recovery } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.report_xid(&uuid, code, recovery))
        }
        ConditionChange::Reset { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.reset(&uuid))
        }
        ConditionChange::Hang { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| control.gpu_mut(&uuid).hung = true)
        }
        ConditionChange::Ecc { gpu } => {
            let uuid = find(&gpu)?;
            control.update(|control| {
                control.gpu_mut(&uuid).ecc_uncorrected += 1;
                control.push_event(&uuid, EventKind::EccDoubleBit);
            })
        }
        ConditionChange::Busy { gpu, percent } => {
            let uuid = find(&gpu)?;
            control.update(|control| {
                control.gpu_mut(&uuid).utilization = (percent > 0).then_some(percent);
            })
        }
        ConditionChange::Mig { gpu, mode } => {
            let uuid = find(&gpu)?;
            let is_used = world
                .gpu_by_uuid(&uuid)
                .is_some_and(|gpu| !NodeMig::new(&control).state(gpu).gpu_instances.is_empty());
            ensure!(!is_used, "GPU {gpu} has MIG instances: destroy them before");
            if !mode {
                // No file is left when no GPU of the node is in MIG mode.
                NodeMig::new(&control).reboot()?;
            }
            control.update(|control| control.gpu_mut(&uuid).mig = mode.then_some(true))
        }
        ConditionChange::MigCreate { gpu, profile, start } => {
            let uuid = find(&gpu)?;
            let gpu = world.gpu_by_uuid(&uuid).context("a GPU of the world")?;
            let mig = NodeMig::new(&control);
            let table = mig.table(gpu)?;
            let slices = table.profile(profile).map_or(0, |profile| profile.slices);
            mig.create(gpu, profile, start, slices)?;
            Ok(())
        }
        ConditionChange::MigDestroy { gpu } => {
            let uuid = find(&gpu)?;
            let gpu = world.gpu_by_uuid(&uuid).context("a GPU of the world")?;
            NodeMig::new(&control).change(gpu, |state, _| {
                ensure_idle(&state.gpu_instances)?;
                state.gpu_instances.clear();
                Ok(())
            })?;
            Ok(())
        }
        ConditionChange::Process { gpu, pid, mib } => {
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
