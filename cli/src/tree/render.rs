//! The tree and the list of allocations as text.

use std::fmt::Write as _;

use tessera_api::names::UNHEALTHY_TAINT_KEY;
use tessera_api::quantity::Quantity;

use super::{CapacityUsage, GpuShare, GpuTree, GpuView, NodeView};
use crate::devices::short;
use crate::output::{Table, count};
use crate::usage::ShareUse;

const TREE_HEADERS: [&str; 5] = ["NODE/GPU/POD", "MODEL", "MEMORY (GiB)", "COMPUTE", "STATE"];

const CLAIM_HEADERS: [&str; 8] =
    ["NAMESPACE", "CLAIM", "PODS", "NODE", "GPU", "MEMORY (GiB)", "COMPUTE", "STATE"];

/// Cells of a bar.
const BAR_WIDTH: u32 = 8;

const NANO_PER_GIB: i128 = (1 << 30) * 1_000_000_000;

/// Returns the tree: nodes, below each its GPUs, below each the pods with an allocation. Equal
/// free GPUs of a node share one line.
pub fn tree_text(tree: &GpuTree, headers: bool) -> String {
    if tree.nodes.is_empty() {
        return "No GPUs found.\n".to_owned();
    }
    let columns = Columns::of(tree);
    let mut table = Table::new(headers.then_some(&TREE_HEADERS[..]));
    for node in &tree.nodes {
        let model = common_model(node);
        table.row(columns.node(node, model.as_deref()));
        let groups = groups(node);
        for (g, group) in groups.iter().enumerate() {
            let is_last = g + 1 == groups.len();
            let branch = if is_last { "└─" } else { "├─" };
            table.row(columns.gpus(group, branch, model.is_none()));
            let shares = &group[0].shares;
            for (s, share) in shares.iter().enumerate() {
                let line = if is_last { "   " } else { "│  " };
                let branch = if s + 1 == shares.len() { "└─" } else { "├─" };
                table.row(columns.share(share, &format!("{line}{branch}")));
            }
        }
    }
    let mut text = table.render();
    if headers {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n{}\n", totals(tree));
    }
    text
}

/// Returns one line for each allocation.
pub fn claims_text(tree: &GpuTree, headers: bool) -> String {
    let mut shares: Vec<(&GpuShare, &NodeView, &GpuView)> = Vec::new();
    for node in &tree.nodes {
        for gpu in &node.gpus {
            shares.extend(gpu.shares.iter().map(|share| (share, node, gpu)));
        }
    }
    if shares.is_empty() {
        return "No claims with GPUs found.\n".to_owned();
    }
    shares.sort_by_key(|(share, node, gpu)| {
        (&share.namespace, &share.claim, &node.name, &gpu.device)
    });
    let mut table = Table::new(headers.then_some(&CLAIM_HEADERS[..])).align_right(&[5, 6]);
    for (share, node, gpu) in shares {
        let pods = if share.pods.is_empty() { "<none>".to_owned() } else { share.pods.join(",") };
        table.row(vec![
            share.namespace.clone(),
            share.claim.clone(),
            pods,
            node.name.clone(),
            short(&gpu.device).to_owned(),
            used_and(share.used.map(|used| gib(used.memory)), &gib(share.memory)),
            match &share.profile {
                Some(profile) => format!("MIG {profile}"),
                None => {
                    used_and(share.used.map(used_compute), &format!("{}%", percent(share.cores)))
                }
            },
            share_state(share),
        ]);
    }
    table.render()
}

/// Widths of the numbers in the columns of memory and compute.
struct Columns {
    allocated_gib: usize,
    total_gib: usize,
    allocated_percent: usize,
}

impl Columns {
    fn of(tree: &GpuTree) -> Self {
        let gpus = tree.gpus().map(|gpu| (gpu.memory, gpu.cores));
        let nodes = tree.nodes.iter().map(|node| (node.memory, node.cores));
        let mut columns = Self { allocated_gib: 0, total_gib: 0, allocated_percent: 0 };
        for (memory, cores) in gpus.chain(nodes) {
            columns.allocated_gib = columns.allocated_gib.max(gib(memory.allocated).len());
            columns.total_gib = columns.total_gib.max(gib(memory.total).len());
            columns.allocated_percent =
                columns.allocated_percent.max(percent(cores.allocated).len());
        }
        columns
    }

    fn node(&self, node: &NodeView, model: Option<&str>) -> Vec<String> {
        let number = node.gpus.len();
        let model = match model {
            Some(model) => format!("{number}x {model}"),
            None => count(number, "GPU"),
        };
        let free = node.gpus.iter().filter(|gpu| gpu.is_free()).count();
        let state = std::iter::once(format!("{free}/{number} free"));
        let state: Vec<String> = state.chain(node.state.iter().cloned()).collect();
        vec![
            node.name.clone(),
            model,
            self.memory(node.memory),
            self.compute(node.cores),
            state.join(", "),
        ]
    }

    fn gpus(&self, group: &[&GpuView], branch: &str, shows_model: bool) -> Vec<String> {
        let gpu = group[0];
        let name = match (group.len(), gpu.index) {
            (1, Some(index)) => format!("{index} {}", short(&gpu.device)),
            (1, None) => short(&gpu.device).to_owned(),
            (number, _) => format!("{} ({number} GPUs)", ranges(group)),
        };
        let model = gpu.product.as_deref().filter(|_| shows_model).map(model).unwrap_or_default();
        vec![
            format!("{branch} {name}"),
            model,
            self.memory(gpu.memory),
            if gpu.mig { "MIG".to_owned() } else { self.compute(gpu.cores) },
            gpu_state(gpu),
        ]
    }

    fn share(&self, share: &GpuShare, branch: &str) -> Vec<String> {
        let user = match share.pods.as_slice() {
            [] => format!("{}/{} (claim without pod)", share.namespace, share.claim),
            pods => format!("{}/{}", share.namespace, pods.join(",")),
        };
        let profile = share.profile.as_ref().map(|profile| format!("MIG {profile}"));
        let compute = if profile.is_some() { String::new() } else { self.share_compute(share) };
        vec![
            format!("{branch} {user}"),
            profile.unwrap_or_default(),
            self.share_memory(share),
            compute,
            share_state(share),
        ]
    }

    /// Returns the memory of an allocation; below `allocated/total` of its GPU it is
    /// `used/allocated` if the actual use was read.
    fn share_memory(&self, share: &GpuShare) -> String {
        let (allocated, left) = (gib(share.memory), self.allocated_gib);
        match share.used {
            Some(used) => format!("{:>left$}/{allocated}", gib(used.memory)),
            None => format!("{allocated:>left$}"),
        }
    }

    /// Returns the compute of an allocation, as [`Self::share_memory`] does.
    fn share_compute(&self, share: &GpuShare) -> String {
        let (allocated, left) = (percent(share.cores), self.allocated_percent);
        match share.used {
            Some(used) => format!("{:>left$}/{allocated}%", used_compute(used)),
            None => format!("{allocated:>left$}%"),
        }
    }

    fn memory(&self, memory: CapacityUsage) -> String {
        let (allocated, total) = (gib(memory.allocated), gib(memory.total));
        let (left, right) = (self.allocated_gib, self.total_gib);
        format!("{allocated:>left$}/{total:<right$} {}", bar(memory))
    }

    fn compute(&self, cores: CapacityUsage) -> String {
        let width = self.allocated_percent;
        format!("{:>width$}/{}%", percent(cores.allocated), percent(cores.total))
    }
}

/// Groups equal free GPUs; every other GPU is a group of its own.
fn groups(node: &NodeView) -> Vec<Vec<&GpuView>> {
    let mut groups: Vec<Vec<&GpuView>> = Vec::new();
    for gpu in &node.gpus {
        let can_join = |other: &GpuView| {
            let is_plain = |gpu: &GpuView| gpu.is_free() && gpu.shares.is_empty();
            is_plain(gpu)
                && is_plain(other)
                && gpu.index.is_some()
                && (gpu.memory, gpu.cores, &gpu.product, &gpu.state, &gpu.taints)
                    == (other.memory, other.cores, &other.product, &other.state, &other.taints)
        };
        match groups.iter_mut().find(|group| can_join(group[0])) {
            Some(group) => group.push(gpu),
            None => groups.push(vec![gpu]),
        }
    }
    groups
}

/// Returns the indices of a group: `0,2-5`.
fn ranges(group: &[&GpuView]) -> String {
    let mut ranges: Vec<(i64, i64)> = Vec::new();
    for index in group.iter().filter_map(|gpu| gpu.index) {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == index => *last = index,
            _ => ranges.push((index, index)),
        }
    }
    let text = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    text.collect::<Vec<_>>().join(",")
}

/// Returns the model of a node whose GPUs are all of one product.
fn common_model(node: &NodeView) -> Option<String> {
    let product = node.gpus.first()?.product.as_ref()?;
    let is_common = node.gpus.iter().all(|gpu| gpu.product.as_ref() == Some(product));
    is_common.then(|| model(product))
}

/// Returns the short form of a product name: `H100 80GB` for `NVIDIA H100 80GB HBM3`.
fn model(product: &str) -> String {
    let name = product.strip_prefix("NVIDIA ").unwrap_or(product);
    match name.find("GB ") {
        Some(end) => name[..end + 2].to_owned(),
        None => name.to_owned(),
    }
}

fn gpu_state(gpu: &GpuView) -> String {
    let mig = || count(gpu.shares.len(), "MIG device");
    let use_of_gpu = if gpu.mig {
        (!gpu.shares.is_empty()).then(mig)
    } else if gpu.shares.iter().any(|share| share.whole) {
        Some("exclusive".to_owned())
    } else if gpu.is_unused() {
        gpu.is_free().then(|| "free".to_owned())
    } else if gpu.memory.free.is_zero() {
        Some("full".to_owned())
    } else {
        Some("shared".to_owned())
    };
    let mut states: Vec<String> = use_of_gpu.into_iter().collect();
    for taint in &gpu.taints {
        let value = taint.strip_prefix(UNHEALTHY_TAINT_KEY).and_then(|rest| rest.split(':').next());
        states.push(match value {
            Some(value) if !value.is_empty() => {
                format!("Unhealthy ({})", value.trim_start_matches('='))
            }
            Some(_) => "Unhealthy".to_owned(),
            None => taint.clone(),
        });
    }
    states.extend(gpu.state.iter().filter(|state| *state != "Unhealthy").cloned());
    states.join(", ")
}

/// Returns `used/allocated`, or only the latter if the actual use was not read.
fn used_and(used: Option<String>, allocated: &str) -> String {
    used.map_or_else(|| allocated.to_owned(), |used| format!("{used}/{allocated}"))
}

/// Returns the percentage of a GPU that an allocation used; `?` if it is unknown.
fn used_compute(used: ShareUse) -> String {
    used.cores.map_or_else(|| "?".to_owned(), |cores| cores.to_string())
}

fn share_state(share: &GpuShare) -> String {
    let all = [
        ("exclusive", share.whole),
        ("admin access", share.admin),
        ("ClaimDeleted", share.claim_deleted),
    ];
    let states = all.into_iter().filter(|(_, applies)| *applies).map(|(name, _)| name);
    states.chain(share.sharing).collect::<Vec<_>>().join(", ")
}

/// Returns a bar of the allocated part. It is empty or full only if the capacity is.
fn bar(usage: CapacityUsage) -> String {
    let (total, allocated) = (usage.total.nano(), usage.allocated.nano());
    let cells = i128::from(BAR_WIDTH);
    let filled = match allocated {
        0 => 0,
        _ if usage.free.is_zero() => cells,
        _ => (allocated * cells / total.max(1)).clamp(1, cells - 1),
    };
    (0..cells).map(|cell| if cell < filled { '▇' } else { '░' }).collect()
}

/// Returns an amount of memory in GiB with one decimal.
pub(crate) fn gib(memory: Quantity) -> String {
    let tenths = (memory.nano() * 10 + NANO_PER_GIB / 2).div_euclid(NANO_PER_GIB);
    match tenths {
        0 if !memory.is_zero() => "<0.1".to_owned(),
        _ => format!("{}.{}", tenths / 10, tenths % 10),
    }
}

/// Returns an amount of compute in percent of one GPU, without the sign.
pub(crate) fn percent(cores: Quantity) -> String {
    cores.value().to_string()
}

fn totals(tree: &GpuTree) -> String {
    let free = tree.gpus().filter(|gpu| gpu.is_free()).count();
    let allocations: usize = tree.gpus().map(|gpu| gpu.shares.len()).sum();
    let (memory, cores) = tree.usage();
    format!(
        "{}, {} ({free} free), {}; memory {}/{} GiB, compute {}/{}%",
        count(tree.nodes.len(), "node"),
        count(tree.gpus().count(), "GPU"),
        count(allocations, "allocation"),
        gib(memory.allocated),
        gib(memory.total),
        percent(cores.allocated),
        percent(cores.total)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_one_decimal() {
        let text = |quantity: &str| gib(Quantity::parse(quantity).expect("a quantity"));
        assert_eq!(
            [text("0"), text("1Mi"), text("19Gi"), text("81559Mi"), text("80Gi")],
            ["0.0", "<0.1", "19.0", "79.6", "80.0"]
        );
    }

    #[test]
    fn model_omits_vendor_and_form_factor() {
        assert_eq!(model("NVIDIA H100 80GB HBM3"), "H100 80GB");
        assert_eq!(model("NVIDIA A30"), "A30");
    }

    #[test]
    fn bar_is_full_only_without_free_memory() {
        let bar = |allocated: i64| {
            let gib = |number: i64| Quantity::from_integer(number << 30);
            super::bar(CapacityUsage::new(gib(80), gib(allocated)))
        };
        assert_eq!(bar(0), "░░░░░░░░");
        assert_eq!(bar(1), "▇░░░░░░░");
        assert_eq!(bar(40), "▇▇▇▇░░░░");
        assert_eq!(bar(79), "▇▇▇▇▇▇▇░");
        assert_eq!(bar(80), "▇▇▇▇▇▇▇▇");
    }
}
