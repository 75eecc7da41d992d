//! The link matrix in a slice's annotation: attributes cannot hold it, and in the same object it
//! changes together with the devices.
//!
//! ```json
//! {"links": [["gpu-1f0c…", "gpu-77aa…", "NVLink", 4], ["gpu-1f0c…", "gpu-93b0…", "PHB", 1]]}
//! ```
//!
//! A link is in the slice of its first GPU. GPUs without an entry are joined by whatever the
//! machine offers (`SYS`).

use k8s_openapi::api::resource::v1::ResourceSlice;

use crate::gpu::{Link, LinkKind, PcieLevel};
use crate::names::{DRIVER_NAME, DeviceName, GpuUuid, TOPOLOGY_ANNOTATION};

/// Largest annotation that is written. The API allows 256 KiB for all annotations of an object
/// together, keys included; the rest is left to others.
pub const MAX_ANNOTATION_BYTES: usize = 240 * 1024;

/// Bytes that the API allows for all annotations of an object together
/// (`TotalAnnotationSizeLimitB`).
const MAX_API_BYTES: usize = 256 * 1024;

const NVLINK: &str = "NVLink";

/// The links that a slice, or a pool, tells of.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    /// The links, sorted, the farthest PCIe level left out.
    links: Vec<Link>,
}

/// Error returned for an annotation that is not a link matrix.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// More than an API server accepts.
    #[error(
        "annotation {TOPOLOGY_ANNOTATION} has {bytes} bytes; all annotations together may have {MAX_API_BYTES}"
    )]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Not JSON of the right shape.
    #[error(
        "annotation {TOPOLOGY_ANNOTATION} is not of the form {{\"links\": [[device, device, kind, count], …]}}"
    )]
    Malformed {
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// A link between things that are no GPUs.
    #[error(
        "annotation {TOPOLOGY_ANNOTATION}: links[{index}] names `{device}`, which is no GPU of ours"
    )]
    NotAGpu {
        /// Position of the link.
        index: usize,
        /// The device named.
        device: String,
    },
}

/// The annotation's JSON. Unknown fields and kinds are for later versions to add.
#[derive(serde::Serialize, serde::Deserialize)]
struct Document {
    links: Vec<(String, String, String, u32)>,
}

impl Topology {
    /// The topology of these links.
    pub fn new(links: impl IntoIterator<Item = Link>) -> Self {
        let mut links: Vec<Link> = links
            .into_iter()
            .filter(|link| link.kind != LinkKind::Pcie(PcieLevel::System))
            .collect();
        links.sort();
        links.dedup();
        Self { links }
    }

    /// The links: sorted by the GPUs at their ends.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The number of NVLinks between two GPUs.
    pub fn nvlinks(&self, one: &GpuUuid, other: &GpuUuid) -> u32 {
        self.between(one, other).map(Link::nvlinks).max().unwrap_or(0)
    }

    /// Returns the distance of two GPUs over PCIe.
    pub fn pcie(&self, one: &GpuUuid, other: &GpuUuid) -> PcieLevel {
        let levels = self.between(one, other).filter_map(|link| match link.kind {
            LinkKind::Pcie(level) => Some(level),
            LinkKind::NvLink(_) => None,
        });
        levels.max().unwrap_or(PcieLevel::System)
    }

    fn between<'t>(
        &'t self,
        one: &'t GpuUuid,
        other: &'t GpuUuid,
    ) -> impl Iterator<Item = &'t Link> {
        let (a, b) = if one <= other { (one, other) } else { (other, one) };
        let start = self.links.partition_point(|link| (&link.a, &link.b) < (a, b));
        self.links[start..].iter().take_while(move |link| link.a == *a && link.b == *b)
    }

    /// The annotation; `None` without links. Where it would be too long the least valuable links
    /// are left out: PCIe before NVLink, far before close, few before many.
    pub fn to_annotation(&self) -> Option<String> {
        let mut links = self.links.clone();
        while !links.is_empty() {
            let text = write(&links);
            if text.len() <= MAX_ANNOTATION_BYTES {
                return Some(text);
            }
            let least = links.iter().map(|link| link.kind).min()?;
            links.retain(|link| link.kind != least);
        }
        None
    }

    /// Reads an annotation. Kinds of link that this version does not know are skipped.
    ///
    /// # Errors
    /// It is not a link matrix between GPUs, or longer than an API server accepts.
    pub fn parse(annotation: &str) -> Result<Self, TopologyError> {
        if annotation.len() > MAX_API_BYTES {
            return Err(TopologyError::TooLong { bytes: annotation.len() });
        }
        let document: Document = serde_json::from_str(annotation)
            .map_err(|source| TopologyError::Malformed { source })?;
        let mut links = Vec::with_capacity(document.links.len());
        for (index, (one, other, kind, count)) in document.links.into_iter().enumerate() {
            let (one, other) = (gpu(index, one)?, gpu(index, other)?);
            let kind = match kind.as_str() {
                NVLINK => Some(LinkKind::NvLink(count)),
                word => word.parse().ok().map(LinkKind::Pcie),
            };
            links.extend(kind.map(|kind| Link::new(one, other, kind)));
        }
        Ok(Self::new(links))
    }

    /// The topology of a pool, from all its slices. Slices of other drivers and slices without the
    /// annotation add nothing.
    ///
    /// # Errors
    /// An annotation is malformed.
    pub fn of_slices<'s>(
        slices: impl IntoIterator<Item = &'s ResourceSlice>,
    ) -> Result<Self, TopologyError> {
        let mut links = Vec::new();
        for slice in slices.into_iter().filter(|slice| slice.spec.driver == DRIVER_NAME) {
            if let Some(annotation) =
                slice.metadata.annotations.as_ref().and_then(|all| all.get(TOPOLOGY_ANNOTATION))
            {
                links.extend(Self::parse(annotation)?.links);
            }
        }
        Ok(Self::new(links))
    }
}

fn gpu(index: usize, device: String) -> Result<GpuUuid, TopologyError> {
    let uuid = DeviceName::new(&device).and_then(|name| GpuUuid::from_device_name(&name));
    uuid.map_err(|_| TopologyError::NotAGpu { index, device })
}

fn write(links: &[Link]) -> String {
    let entry = |link: &Link| {
        let (kind, count) = match link.kind {
            LinkKind::NvLink(count) => (NVLINK, count),
            LinkKind::Pcie(level) => (level.word(), 1),
        };
        (link.a.device_name().into(), link.b.device_name().into(), kind.to_owned(), count)
    };
    let document = Document { links: links.iter().map(entry).collect() };
    serde_json::to_string(&document).expect("invariant: strings and numbers always serialise")
}
