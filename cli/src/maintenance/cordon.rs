//! Cordons: one DeviceTaintRule for each GPU.

use k8s_openapi::api::resource::v1::{
    DeviceTaint, DeviceTaintRule, DeviceTaintRuleSpec, DeviceTaintSelector,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde::Serialize;
use tessera_api::names::{CORDONED_TAINT_KEY, DRIVER_NAME, NO_SCHEDULE};

use super::{GpuError, TargetGpu};

/// Beginning of the names of the rules. A device name has at most 40 characters and is unique in
/// the cluster.
const PREFIX: &str = "tessera-cordon-";

/// Field manager, and value of the label `app.kubernetes.io/managed-by` of the rules.
const MANAGER: &str = "kubectl-tessera";

/// The effect of a command on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum CordonChange {
    /// The rule was created.
    Cordoned,
    /// The rule existed.
    AlreadyCordoned,
    /// The rule was deleted.
    Uncordoned,
    /// There was no rule.
    NotCordoned,
}

impl CordonChange {
    /// Returns the change in words.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Cordoned => "cordoned",
            Self::AlreadyCordoned => "already cordoned",
            Self::Uncordoned => "uncordoned",
            Self::NotCordoned => "not cordoned",
        }
    }
}

/// The rules of cordoned GPUs in a cluster.
pub struct Cordons {
    rules: Api<DeviceTaintRule>,
    /// Requests change nothing.
    is_dry_run: bool,
}

impl Cordons {
    /// Returns the rules of a cluster. In a dry run requests are checked by the API server, and
    /// change nothing.
    #[must_use]
    pub fn new(client: Client, is_dry_run: bool) -> Self {
        Self { rules: Api::all(client), is_dry_run }
    }

    /// Keeps new claims off a GPU.
    ///
    /// # Errors
    /// [`GpuError::NoRules`], [`GpuError::Forbidden`], [`GpuError::Request`].
    pub async fn cordon(&self, gpu: &TargetGpu) -> Result<CordonChange, GpuError> {
        let wanted = rule(gpu);
        let parameters =
            PostParams { dry_run: self.is_dry_run, field_manager: Some(MANAGER.to_owned()) };
        match self.rules.create(&parameters, &wanted).await {
            Ok(_) => Ok(CordonChange::Cordoned),
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                self.restore(gpu, wanted, &parameters).await
            }
            Err(error) => Err(GpuError::of_rules("create", error)),
        }
    }

    /// Gives an existing rule the content of a cordon.
    async fn restore(
        &self,
        gpu: &TargetGpu,
        wanted: DeviceTaintRule,
        parameters: &PostParams,
    ) -> Result<CordonChange, GpuError> {
        let name = rule_name(gpu);
        let live = self.rules.get(&name).await.map_err(|error| GpuError::of_rules("get", error))?;
        let mut spec = live.spec.clone();
        spec.taint.time_added = None;
        if spec == wanted.spec {
            return Ok(CordonChange::AlreadyCordoned);
        }
        let rule = DeviceTaintRule { spec: wanted.spec, ..live };
        let written = self.rules.replace(&name, parameters, &rule).await;
        written.map(|_| CordonChange::Cordoned).map_err(|error| GpuError::of_rules("update", error))
    }

    /// Allows new claims on a GPU again.
    ///
    /// # Errors
    /// [`GpuError::NoRules`], [`GpuError::Forbidden`], [`GpuError::Request`].
    pub async fn uncordon(&self, gpu: &TargetGpu) -> Result<CordonChange, GpuError> {
        let name = rule_name(gpu);
        // A missing rule and a missing kind have the same status.
        if self.rules.get_opt(&name).await.map_err(|e| GpuError::of_rules("get", e))?.is_none() {
            return Ok(CordonChange::NotCordoned);
        }
        let parameters = DeleteParams { dry_run: self.is_dry_run, ..DeleteParams::default() };
        match self.rules.delete(&name, &parameters).await {
            Ok(_) => Ok(CordonChange::Uncordoned),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(CordonChange::NotCordoned),
            Err(error) => Err(GpuError::of_rules("delete", error)),
        }
    }
}

fn rule_name(gpu: &TargetGpu) -> String {
    format!("{PREFIX}{}", gpu.device)
}

fn rule(gpu: &TargetGpu) -> DeviceTaintRule {
    let manager = ("app.kubernetes.io/managed-by".to_owned(), MANAGER.to_owned());
    DeviceTaintRule {
        metadata: ObjectMeta {
            name: Some(rule_name(gpu)),
            labels: Some([manager].into()),
            ..ObjectMeta::default()
        },
        spec: DeviceTaintRuleSpec {
            device_selector: Some(DeviceTaintSelector {
                driver: Some(DRIVER_NAME.to_owned()),
                pool: Some(gpu.node.clone()),
                device: Some(gpu.device.clone()),
            }),
            taint: DeviceTaint {
                key: CORDONED_TAINT_KEY.to_owned(),
                effect: NO_SCHEDULE.to_owned(),
                ..DeviceTaint::default()
            },
        },
        ..DeviceTaintRule::default()
    }
}
