//! Settings of the dialects: which are read, and with which names, factors and defaults.
//!
//! ```yaml
//! deviceClass: gpu.tessera.dev
//! default: [hami]              # namespaces without the label gpu.tessera.dev/dialect
//! dialects:
//!   hami: {memoryFactor: 1, computePolicy: Balance}
//!   volcano: {}
//! ```
//!
//! An unknown field is an error. A name that asks for GPUs belongs to one dialect of `default`.

mod entry;
mod own;
mod words;

use std::collections::BTreeMap;

use serde::Deserialize;
use tessera_api::names::{DRIVER_NAME, DeviceClassName};

use crate::dialects::{self, Trigger};
use crate::name::Dialect;

pub use entry::{Action, Common, Entry, PlacementSetting};
pub use own::{
    AwsSettings, ElasticSettings, FourParadigmSettings, GpuManagerSettings, GpushareSettings,
    HamiSettings, KaiSettings, KubegpuSettings, MemoryUnit, NvidiaResource, NvidiaSettings,
    SlotSharing, VgpuManagerSettings, VolcanoSettings,
};

/// Settings of all dialects.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Settings {
    /// DeviceClass of the claims.
    #[serde(default)]
    pub device_class: ClassSetting,
    /// Dialects of namespaces without [`DIALECT_LABEL`](crate::DIALECT_LABEL).
    #[serde(default)]
    pub default: Vec<Dialect>,
    /// Settings of each dialect that is read.
    #[serde(default)]
    pub dialects: Dialects,
}

/// Name of a DeviceClass; by default the chart's class of all GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ClassSetting(pub String);

impl Default for ClassSetting {
    fn default() -> Self {
        Self(DRIVER_NAME.to_owned())
    }
}

/// Settings by dialect. A dialect that is absent is not read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Dialects {
    /// HAMi.
    pub hami: Option<Entry<HamiSettings>>,
    /// 4paradigm.
    #[serde(rename = "4paradigm")]
    pub four_paradigm: Option<Entry<FourParadigmSettings>>,
    /// vgpu-manager.
    pub vgpu_manager: Option<Entry<VgpuManagerSettings>>,
    /// Volcano.
    pub volcano: Option<Entry<VolcanoSettings>>,
    /// KAI and Run:ai.
    pub kai: Option<Entry<KaiSettings>>,
    /// NVIDIA and GKE.
    pub nvidia: Option<Entry<NvidiaSettings>>,
    /// AWS.
    pub aws: Option<Entry<AwsSettings>>,
    /// elastic-gpu.
    pub elastic: Option<Entry<ElasticSettings>>,
    /// KubeGPU.
    pub kubegpu: Option<Entry<KubegpuSettings>>,
    /// Aliyun gpushare.
    pub gpushare: Option<Entry<GpushareSettings>>,
    /// gpu-manager.
    pub gpu_manager: Option<Entry<GpuManagerSettings>>,
}

/// Settings that contradict one another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// A default dialect without settings.
    #[error(
        "default: {dialect}: there is no entry dialects.{dialect}; add one, `{{}}` for the defaults"
    )]
    NoEntry {
        /// The dialect.
        dialect: Dialect,
    },
    /// A name that two default dialects read.
    #[error(
        "default: {first} and {second} both read `{name}`; keep one, and label the namespaces of the other with {label}={second}",
        label = crate::DIALECT_LABEL
    )]
    Ambiguous {
        /// The first dialect.
        first: Dialect,
        /// The other one.
        second: Dialect,
        /// The name.
        name: String,
    },
    /// A value out of its range.
    #[error("dialects.{dialect}.{field}: {value}: {allowed}")]
    Value {
        /// The dialect.
        dialect: Dialect,
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// The allowed values.
        allowed: &'static str,
    },
    /// The name of the DeviceClass is not valid.
    #[error("deviceClass: {value}: {rule}", rule = DeviceClassName::RULE)]
    Class {
        /// The name.
        value: String,
    },
}

impl Settings {
    /// Returns settings with each dialect at its defaults, and `default` in effect.
    #[must_use]
    pub fn with_defaults(default: &[Dialect]) -> Self {
        let dialects = Dialects {
            hami: Some(Entry::default()),
            four_paradigm: Some(Entry::default()),
            vgpu_manager: Some(Entry::default()),
            volcano: Some(Entry::default()),
            kai: Some(Entry::default()),
            nvidia: Some(Entry::default()),
            aws: Some(Entry::default()),
            elastic: Some(Entry::default()),
            kubegpu: Some(Entry::default()),
            gpushare: Some(Entry::default()),
            gpu_manager: Some(Entry::default()),
        };
        Self { device_class: ClassSetting::default(), default: default.to_vec(), dialects }
    }

    /// Returns the settings with `default` in effect. A dialect without settings gets its defaults.
    #[must_use]
    pub fn selecting(self, default: &[Dialect]) -> Self {
        let Self { device_class, dialects: set, .. } = self;
        let all = Self::with_defaults(default).dialects;
        let has = |dialect: Dialect| default.contains(&dialect);
        macro_rules! chosen {
            ($($field:ident: $dialect:ident),+ $(,)?) => {
                Dialects { $($field: set.$field.or(all.$field.filter(|_| has(Dialect::$dialect)))),+ }
            };
        }
        let dialects = chosen! {
            hami: Hami,
            four_paradigm: FourParadigm,
            vgpu_manager: VgpuManager,
            volcano: Volcano,
            kai: Kai,
            nvidia: Nvidia,
            aws: Aws,
            elastic: Elastic,
            kubegpu: Kubegpu,
            gpushare: Gpushare,
            gpu_manager: GpuManager,
        };
        Self { device_class, default: default.to_vec(), dialects }
    }

    /// Checks that the settings do not contradict one another.
    ///
    /// # Errors
    /// The first contradiction.
    pub(crate) fn check(&self) -> Result<(), SettingsError> {
        if DeviceClassName::new(&self.device_class.0).is_err() {
            return Err(SettingsError::Class { value: self.device_class.0.clone() });
        }
        let mut owners: BTreeMap<Trigger, Dialect> = BTreeMap::new();
        for dialect in Dialect::ALL {
            if let Some(reader) = dialects::reader(&self.dialects, dialect) {
                reader.check()?;
            }
        }
        for &dialect in &self.default {
            let reader = dialects::reader(&self.dialects, dialect)
                .ok_or(SettingsError::NoEntry { dialect })?;
            for trigger in reader.triggers() {
                let name = trigger.name().to_owned();
                match owners.insert(trigger, dialect) {
                    Some(first) if first != dialect => {
                        return Err(SettingsError::Ambiguous { first, second: dialect, name });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}
