//! The conversion of a pod.

use std::collections::{BTreeMap, BTreeSet};

use json_patch::Patch;
use serde_json::Value;
use tessera_api::names::MIRROR_ANNOTATION;

use crate::claim::{Requests, Template};
use crate::dialects::{self, Read, Reader, Trigger};
use crate::name::{DIALECT_LABEL, Dialect, NO_DIALECT};
use crate::original::{CONVERTED_ANNOTATION, Original, OriginalError};
use crate::patch::Changes;
use crate::pod::Pod;
use crate::refusal::PodRefusal;
use crate::settings::{Settings, SettingsError};

/// Namespace whose pods are never converted.
pub(crate) const SYSTEM_NAMESPACE: &str = "kube-system";

/// Converts pods by settings that do not contradict one another.
#[derive(Debug, Clone)]
pub struct Converter {
    settings: Settings,
}

/// The namespace of a pod.
#[derive(Debug, Clone, Copy)]
pub struct NamespaceView<'n> {
    /// Name.
    pub name: &'n str,
    /// Labels.
    pub labels: &'n BTreeMap<String, String>,
}

/// Result for a pod that is not refused.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// The pod stays as it is.
    Leave(LeaveReason),
    /// The pod changes.
    Convert(Conversion),
}

/// Reason why a pod stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveReason {
    /// It names no resource or annotation of a dialect that is read in its namespace.
    NothingToConvert,
    /// A label of the pod or its namespace opts out.
    OptedOut,
    /// The dialect's system does not look at pods of its scheduler.
    OtherScheduler,
    /// It was converted before.
    Converted,
    /// The kubelet made it; mirror pods cannot have claims.
    MirrorPod,
    /// It is in `kube-system`.
    SystemNamespace,
}

/// Form of a converted manifest.
pub struct ManifestForm<'f> {
    /// Returns the name of the template in the manifest.
    pub template_name: &'f mut dyn FnMut(&Template) -> String,
    /// True if the pod shall tolerate taints named as its resources, as kube-apiserver adds with
    /// the admission plugin ExtendedResourceToleration.
    pub add_tolerations: bool,
}

/// Changes of a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversion {
    /// The dialect.
    pub dialect: Dialect,
    /// Template of the pod's claim; `None` if no container has a GPU.
    pub template: Option<Template>,
    /// The changes.
    pub patch: Patch,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// Errors of a conversion.
#[derive(Debug, thiserror::Error)]
pub enum ConversionError {
    /// A field has no meaning, or none that Tessera enforces.
    #[error(transparent)]
    Refused(#[from] PodRefusal),
    /// The object is not a pod or pod template.
    #[error("{field}: expected {expected}")]
    Structure {
        /// The field.
        field: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A label names no dialect, or one without settings.
    #[error(
        "label {DIALECT_LABEL}: {value}: expected a dialect of the settings or `{NO_DIALECT}`: {known}"
    )]
    UnknownDialect {
        /// Value of the label.
        value: String,
        /// Dialects of the settings.
        known: String,
    },
    /// Names of two dialects in one pod.
    #[error(
        "`{first_name}` is read by {first} and `{second_name}` by {second}: a pod is of one dialect; remove the names of the other"
    )]
    TwoDialects {
        /// A dialect.
        first: Dialect,
        /// A name of it.
        first_name: String,
        /// The other dialect.
        second: Dialect,
        /// A name of it.
        second_name: String,
    },
    /// A pod that was converted from one dialect has a name of another.
    #[error(
        "the pod is one of {first}, and `{name}` is read by {second}: a pod is of one dialect; remove the names of the other"
    )]
    ConvertedByOther {
        /// The dialect that it was converted from.
        first: Dialect,
        /// The other dialect.
        second: Dialect,
        /// A name of the other.
        name: String,
    },
    /// The label of the namespace names no dialect, or one without settings.
    #[error(
        "label {DIALECT_LABEL} of namespace {namespace}: expected a dialect of the settings or `{NO_DIALECT}`: {known}"
    )]
    UnknownNamespaceDialect {
        /// The namespace.
        namespace: String,
        /// Dialects of the settings.
        known: String,
    },
    /// A pod that was converted names the dialect's resources again.
    #[error(
        "annotation {CONVERTED_ANNOTATION}: the pod was converted, and names `{name}` again; remove one of the two"
    )]
    ConvertedAgain {
        /// The resource or annotation.
        name: String,
    },
    /// The annotation of a converted pod cannot be read.
    #[error(transparent)]
    Original(#[from] OriginalError),
    /// The pod was not converted.
    #[error("the pod has no annotation {CONVERTED_ANNOTATION}")]
    NotConverted,
}

impl Converter {
    /// Checks the settings.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self { settings })
    }

    /// Returns the names by which pods ask for GPUs, of all dialects that have settings.
    #[must_use]
    pub fn triggers(&self) -> BTreeSet<Trigger> {
        self.readers().flat_map(Read::triggers).collect()
    }

    /// Returns the dialects that read an extended resource, of those that have settings.
    #[must_use]
    pub fn dialects_of(&self, resource: &str) -> Vec<Dialect> {
        let reads = |read: &&dyn Read| read.names().resources.iter().any(|name| name == resource);
        self.readers().filter(reads).map(Read::dialect).collect()
    }

    /// Returns the changes of a pod or pod template.
    ///
    /// # Errors
    /// [`ConversionError`], with the field.
    pub fn convert(
        &self,
        pod: &Value,
        namespace: NamespaceView<'_>,
    ) -> Result<Verdict, ConversionError> {
        self.by_labels(pod, namespace, None)
    }

    /// Returns the changes of a pod in the webhook, for which kube-apiserver has decided by the
    /// [rules](Self::admission_rules) that `dialect` reads it: as [`convert`](Self::convert), but
    /// without the labels of the namespace.
    ///
    /// # Errors
    /// [`ConversionError`], with the field.
    pub fn admit(
        &self,
        pod: &Value,
        namespace: &str,
        dialect: Dialect,
    ) -> Result<Verdict, ConversionError> {
        let namespace = NamespaceView { name: namespace, labels: &BTreeMap::new() };
        self.converted(&self::pod(pod)?, namespace, &[dialect], None)
    }

    /// Returns the refusal of a pod for which kube-apiserver has decided by the
    /// [rules](Self::admission_rules) that its label or that of its namespace names no dialect.
    #[must_use]
    pub fn refused_label(&self, pod: &Value, namespace: &str) -> ConversionError {
        match pod["metadata"]["labels"][DIALECT_LABEL].as_str() {
            Some(value) => self.unknown(value),
            None => ConversionError::UnknownNamespaceDialect {
                namespace: namespace.to_owned(),
                known: self.known(),
            },
        }
    }

    /// Returns the changes of a pod template that is written by hand: as those of
    /// [`convert`](Self::convert), with a template name of the caller and without the annotation.
    ///
    /// # Errors
    /// [`ConversionError`], with the field.
    pub fn convert_manifest(
        &self,
        pod: &Value,
        namespace: NamespaceView<'_>,
        form: &mut ManifestForm<'_>,
    ) -> Result<Verdict, ConversionError> {
        self.by_labels(pod, namespace, Some(form))
    }

    /// Converts a pod from the dialect that its labels and those of its namespace select.
    fn by_labels(
        &self,
        pod: &Value,
        namespace: NamespaceView<'_>,
        form: Option<&mut ManifestForm<'_>>,
    ) -> Result<Verdict, ConversionError> {
        let pod = self::pod(pod)?;
        let active = match self.active(&pod, namespace)? {
            Ok(active) => active,
            Err(reason) => return Ok(Verdict::Leave(reason)),
        };
        self.converted(&pod, namespace, &active, form)
    }

    fn converted(
        &self,
        pod: &Pod<'_>,
        namespace: NamespaceView<'_>,
        active: &[Dialect],
        form: Option<&mut ManifestForm<'_>>,
    ) -> Result<Verdict, ConversionError> {
        let read = match self.dialect(pod, namespace, active)? {
            Ok(read) => read,
            Err(reason) => return Ok(Verdict::Leave(reason)),
        };
        if let Some(reason) = exemption(pod, namespace) {
            return Ok(Verdict::Leave(reason));
        }
        self.changes(read, pod, form).map(Verdict::Convert)
    }

    /// Returns the template of the claim of a converted pod, from the pod's annotation; `None` if
    /// no container has a GPU. The result is that of [`convert`](Self::convert) with the same
    /// settings.
    ///
    /// # Errors
    /// [`ConversionError`] if the pod was not converted, or would not be converted.
    pub fn template(&self, converted: &Value) -> Result<Option<Template>, ConversionError> {
        let original = Original::of(converted).ok_or(ConversionError::NotConverted)??;
        let restored = original.restored(converted);
        let pod = self::pod(&restored)?;
        let dialect = original.dialect;
        let read = self.reader(dialect).ok_or_else(|| self.unknown(dialect.name()))?;
        let mut reader = Reader::new(read);
        let ask = read.read(&pod, &mut reader)?;
        if ask.containers.is_empty() {
            return Ok(None);
        }
        let requests = Requests::of(&ask, &pod, &mut reader)?;
        let class = &self.settings.device_class.0;
        Ok(Some(Template::new(dialect, class, &ask, &requests)))
    }

    fn changes(
        &self,
        read: &dyn Read,
        pod: &Pod<'_>,
        form: Option<&mut ManifestForm<'_>>,
    ) -> Result<Conversion, ConversionError> {
        let (dialect, names) = (read.dialect(), read.names());
        let mut reader = Reader::new(read);
        let ask = read.read(pod, &mut reader)?;
        let mut requests = None;
        if !ask.containers.is_empty() {
            reader.check_limits_hold(pod, &ask)?;
            requests = Some(Requests::of(&ask, pod, &mut reader)?);
        }
        let class = &self.settings.device_class.0;
        let mut template =
            requests.as_ref().map(|requests| Template::new(dialect, class, &ask, requests));
        let replaces_scheduler = reader.replaced_schedulers().contains(&pod.scheduler());
        let mut original = Some(Original::removed_from(pod, dialect, &names, replaces_scheduler));
        let mut tolerated = Vec::new();
        if let Some(form) = form {
            original = None;
            if let Some(template) = &mut template {
                template.name = (form.template_name)(template);
            }
            if form.add_tolerations {
                tolerated = pod.resources_of(&names.resources);
            }
        }
        let changes = Changes {
            pod,
            names: &names,
            claim: template.as_ref().map(|t| t.name.as_str()).zip(requests.as_ref()),
            environment: &reader.environment,
            replaces_scheduler,
            original: original.as_ref(),
            tolerated: &tolerated,
        };
        let patch = changes.patch();
        Ok(Conversion { dialect, template, patch, warnings: reader.warnings })
    }

    /// Returns the dialects that read the pod by its labels and those of its namespace, or the
    /// reason why none does.
    fn active(
        &self,
        pod: &Pod<'_>,
        namespace: NamespaceView<'_>,
    ) -> Result<Result<Vec<Dialect>, LeaveReason>, ConversionError> {
        let of_namespace = namespace.labels.get(DIALECT_LABEL).map(String::as_str);
        match pod.label(DIALECT_LABEL).or(of_namespace) {
            Some(NO_DIALECT) => Ok(Err(LeaveReason::OptedOut)),
            Some(value) => match Dialect::named(value).filter(|d| self.reader(*d).is_some()) {
                Some(dialect) => Ok(Ok(vec![dialect])),
                None if !self.triggers().iter().any(|trigger| trigger.is_in(pod)) => {
                    Ok(Err(LeaveReason::NothingToConvert))
                }
                None => match exemption(pod, namespace) {
                    Some(reason) => Ok(Err(reason)),
                    None => Err(self.unknown(value)),
                },
            },
            None => Ok(Ok(self.settings.default.clone())),
        }
    }

    /// Returns the dialect of the pod, of the active ones, or the reason why it stays as it is.
    fn dialect(
        &self,
        pod: &Pod<'_>,
        namespace: NamespaceView<'_>,
        active: &[Dialect],
    ) -> Result<Result<&dyn Read, LeaveReason>, ConversionError> {
        let of_namespace = |name: &str| namespace.labels.get(name).map(String::as_str);
        let mut reason = LeaveReason::NothingToConvert;
        let mut found: Option<(&dyn Read, String)> = None;
        for read in active.iter().filter_map(|dialect| self.reader(*dialect)) {
            let triggers = read.triggers();
            let Some(trigger) = triggers.iter().find(|trigger| trigger.is_in(pod)) else {
                continue;
            };
            let reader = Reader::new(read);
            let (of_pod, schedulers) = (|name: &str| pod.label(name), reader.schedulers());
            if reader.opt_out(of_pod).or_else(|| reader.opt_out(of_namespace)).is_some() {
                reason = LeaveReason::OptedOut;
            } else if !schedulers.is_empty() && !schedulers.contains(&pod.scheduler()) {
                reason = LeaveReason::OtherScheduler;
            } else if let Some((first, first_name)) = found {
                return Err(ConversionError::TwoDialects {
                    first: first.dialect(),
                    first_name,
                    second: read.dialect(),
                    second_name: trigger.name().to_owned(),
                });
            } else {
                found = Some((read, trigger.name().to_owned()));
            }
        }
        match (found, pod.annotation(CONVERTED_ANNOTATION)) {
            (Some((read, name)), Some(original)) => Err(converted_again(read, name, original)),
            (None, Some(_)) => Ok(Err(LeaveReason::Converted)),
            (found, None) => Ok(found.map(|(read, _)| read).ok_or(reason)),
        }
    }

    /// Returns the readers of the dialects that have settings.
    pub(crate) fn readers(&self) -> impl Iterator<Item = &dyn Read> {
        Dialect::ALL.into_iter().filter_map(|dialect| self.reader(dialect))
    }

    pub(crate) fn is_default(&self, dialect: Dialect) -> bool {
        self.settings.default.contains(&dialect)
    }

    fn reader(&self, dialect: Dialect) -> Option<&dyn Read> {
        dialects::reader(&self.settings.dialects, dialect)
    }

    fn unknown(&self, value: &str) -> ConversionError {
        let value = crate::refusal::shortened(value);
        ConversionError::UnknownDialect { value, known: self.known() }
    }

    /// Returns the names of the dialects that have settings, for messages.
    fn known(&self) -> String {
        self.readers().map(|read| read.dialect().name()).collect::<Vec<_>>().join(", ")
    }
}

/// Returns the reason why a pod that names GPUs is never converted.
fn exemption(pod: &Pod<'_>, namespace: NamespaceView<'_>) -> Option<LeaveReason> {
    if namespace.name == SYSTEM_NAMESPACE {
        return Some(LeaveReason::SystemNamespace);
    }
    pod.annotation(MIRROR_ANNOTATION).map(|_| LeaveReason::MirrorPod)
}

/// Returns the error of a converted pod that has a name of `read`. kube-apiserver converts a pod by
/// one default dialect after the other.
fn converted_again(read: &dyn Read, name: String, original: &str) -> ConversionError {
    match serde_json::from_str::<Original>(original) {
        Ok(original) if original.dialect != read.dialect() => ConversionError::ConvertedByOther {
            first: original.dialect,
            second: read.dialect(),
            name,
        },
        _ => ConversionError::ConvertedAgain { name },
    }
}

fn pod(root: &Value) -> Result<Pod<'_>, ConversionError> {
    Pod::new(root).map_err(|error| ConversionError::Structure {
        field: error.field,
        expected: error.expected,
    })
}
