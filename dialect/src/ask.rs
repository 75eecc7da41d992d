//! GPUs that the containers of a pod ask for, in units of Tessera.

use tessera_api::config::{
    Compute, ComputePolicy, MemoryPercent, Placement, Sharing, TopologyTerm,
};
use tessera_api::names::MIG_CLASS;

/// GPUs that a pod asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodAsk {
    /// Asks of the containers that have GPUs, in the order of the pod.
    pub containers: Vec<ContainerAsk>,
    /// True if all asks are served by one GPU.
    pub one_gpu: bool,
    /// CEL expressions that each GPU fulfils.
    pub selectors: Vec<String>,
    /// Topology of the GPUs of one container.
    pub topology: Vec<TopologyTerm>,
    /// Preferences among nodes and GPUs.
    pub placement: Placement,
    /// Sharing mechanism, if it is not the default.
    pub sharing: Option<Sharing>,
    /// True if memory may spill to the host.
    pub oversubscribe: bool,
}

/// GPUs that a container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerAsk {
    /// Index in the pod's containers, init containers first.
    pub container: usize,
    /// Groups of GPUs; one but for explicit topology.
    pub groups: Vec<Group>,
}

/// Equal GPUs that one request serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Number of different GPUs, at least 1.
    pub gpus: u64,
    /// Share of each GPU.
    pub share: ShareAsk,
    /// True if the GPUs are connected to one another by NVLink.
    pub one_clique: bool,
    /// DeviceClass; `None`: that of the settings.
    pub class: Option<String>,
    /// Profile if these are MIG devices, such as `1g.10gb`; `None`: GPUs.
    pub mig_profile: Option<String>,
}

/// Share of each GPU of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShareAsk {
    /// Memory.
    pub memory: MemoryAsk,
    /// Reserved compute in percent of a GPU, 0 to 100.
    pub cores: u8,
    /// True if no other share is on the GPU; the memory is then a limit.
    pub exclusive: bool,
    /// Enforcement, priority and ceiling of the compute.
    pub compute: Compute,
}

/// Memory of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryAsk {
    /// All memory of the GPU.
    #[default]
    All,
    /// An amount in MiB, at least 1.
    Mib(u64),
    /// A percentage of the published memory.
    Percent(MemoryPercent),
}

impl ShareAsk {
    /// Returns a whole GPU without a reservation of compute.
    #[must_use]
    pub fn whole() -> Self {
        Self::default()
    }

    /// Returns the share with enforcement by `policy`, if it reserves a part of the compute.
    #[must_use]
    pub fn with_policy(mut self, policy: Option<ComputePolicy>) -> Self {
        if (1..100).contains(&self.cores) {
            self.compute.policy = policy;
        }
        self
    }

    /// Returns true if this share is at least as large as `other` in every respect.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let memory = match (self.memory, other.memory) {
            (MemoryAsk::All, _) => true,
            (MemoryAsk::Mib(own), MemoryAsk::Mib(other)) => own >= other,
            (MemoryAsk::Percent(own), MemoryAsk::Percent(other)) => own >= other,
            _ => false,
        };
        memory && self.cores >= other.cores && self.exclusive >= other.exclusive
    }
}

impl Group {
    /// Returns `gpus` equal shares of GPUs of the settings' DeviceClass.
    #[must_use]
    pub fn of(gpus: u64, share: ShareAsk) -> Self {
        Self { gpus, share, one_clique: false, class: None, mig_profile: None }
    }
}

impl ContainerAsk {
    /// Returns the ask of a container for `gpus` equal shares.
    #[must_use]
    pub fn of(container: usize, gpus: u64, share: ShareAsk) -> Self {
        Self { container, groups: vec![Group::of(gpus, share)] }
    }

    /// Returns the ask of a container for `devices` MIG devices of a profile.
    #[must_use]
    pub fn of_mig(container: usize, devices: u64, profile: String) -> Self {
        let (class, mig_profile) = (Some(MIG_CLASS.to_owned()), Some(profile));
        let group = Group { class, mig_profile, ..Group::of(devices, ShareAsk::whole()) };
        Self { container, groups: vec![group] }
    }

    /// Returns the ask for GPUs of a DeviceClass; `None`: that of the settings.
    #[must_use]
    pub fn of_class(mut self, class: Option<&str>) -> Self {
        for group in &mut self.groups {
            group.class = class.map(str::to_owned);
        }
        self
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> u64 {
        self.groups.iter().map(|group| group.gpus).fold(0, u64::saturating_add)
    }

    /// Returns true if the GPUs of this ask also serve `other`.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let ([own], [other]) = (self.groups.as_slice(), other.groups.as_slice()) else {
            return false;
        };
        own.gpus >= other.gpus
            && own.one_clique == other.one_clique
            && own.class == other.class
            && own.mig_profile == other.mig_profile
            && own.share.covers(&other.share)
    }
}
