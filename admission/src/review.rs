//! The review of one pod: an AdmissionReview in, an AdmissionReview out.

use k8s_openapi::ByteString;
use kube::core::DynamicObject;
use kube::core::admission::{
    AdmissionRequest, AdmissionResponse, AdmissionReview, Operation, SerializePatchError,
};
use tessera_dialect::{AdmissionTask, ConversionError, Converter, Verdict};

/// Longest body of a review, in bytes: kube-apiserver's limit of a request, 3 MiB, twice for text
/// that JSON escapes.
pub const MAX_REVIEW_BYTES: usize = 6 << 20;

/// The result of a review.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReviewResult {
    /// The pod was changed.
    Converted,
    /// The pod stays as it is.
    Left,
    /// The pod was refused.
    Refused,
}

impl ReviewResult {
    /// Returns the value of metric labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Converted => "converted",
            Self::Left => "left",
            Self::Refused => "refused",
        }
    }
}

/// Errors of a review: the request is not one that kube-apiserver sends to this webhook.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The body is not an AdmissionReview.
    #[error("the body is not an AdmissionReview of admission.k8s.io/v1")]
    Malformed(#[source] serde_json::Error),
    /// It has no request.
    #[error("the AdmissionReview has no request")]
    NoRequest,
    /// The object of the request cannot be read as JSON.
    #[error("the object of the request cannot be read")]
    Object(#[source] serde_json::Error),
    /// The patch cannot be written as JSON.
    #[error("the patch cannot be written")]
    Patch(#[source] SerializePatchError),
}

/// Reviews a pod. Returns the answer, and its kind.
///
/// # Errors
/// [`ReviewError`] if the body is not a review.
pub fn review(
    converter: &Converter,
    task: AdmissionTask,
    body: &[u8],
) -> Result<(Vec<u8>, ReviewResult), ReviewError> {
    answered(body, |request| respond(converter, task, request))
}

/// Reads a review, and writes the answer of `respond`.
pub(crate) fn answered(
    body: &[u8],
    respond: impl FnOnce(
        &AdmissionRequest<DynamicObject>,
    ) -> Result<(AdmissionResponse, ReviewResult), ReviewError>,
) -> Result<(Vec<u8>, ReviewResult), ReviewError> {
    let review: AdmissionReview<DynamicObject> =
        serde_json::from_slice(body).map_err(ReviewError::Malformed)?;
    let request: AdmissionRequest<DynamicObject> =
        review.try_into().map_err(|_| ReviewError::NoRequest)?;
    let (response, result) = respond(&request)?;
    Ok((encoded(response).map_err(ReviewError::Object)?, result))
}

fn respond(
    converter: &Converter,
    task: AdmissionTask,
    request: &AdmissionRequest<DynamicObject>,
) -> Result<(AdmissionResponse, ReviewResult), ReviewError> {
    let mut response = AdmissionResponse::from(request);
    let is_pod = request.resource.group.is_empty() && request.resource.resource == "pods";
    let is_creation = request.operation == Operation::Create && request.sub_resource.is_none();
    let Some(pod) = request.object.as_ref().filter(|_| is_pod && is_creation) else {
        return Ok((response, ReviewResult::Left));
    };
    let pod = serde_json::to_value(pod).map_err(ReviewError::Object)?;
    let namespace = request.namespace.as_deref().unwrap_or_default();
    match verdict(converter, task, &pod, namespace) {
        Err(error) => Ok((response.deny(error), ReviewResult::Refused)),
        Ok(Verdict::Leave(_)) => Ok((response, ReviewResult::Left)),
        Ok(Verdict::Convert(conversion)) => {
            if !conversion.warnings.is_empty() {
                response.warnings = Some(conversion.warnings);
            }
            let dialect = conversion.dialect.name().to_owned();
            response.audit_annotations.insert("dialect".to_owned(), dialect);
            let response = response.with_patch(conversion.patch).map_err(ReviewError::Patch)?;
            Ok((response, ReviewResult::Converted))
        }
    }
}

/// Returns the answer as JSON, with the patch in base64. `kube` writes an array of numbers, which
/// is four times as long.
fn encoded(mut response: AdmissionResponse) -> serde_json::Result<Vec<u8>> {
    let patch = response.patch.take().map(ByteString);
    let mut review = serde_json::to_value(response.into_review())?;
    if let Some(patch) = patch {
        review["response"]["patch"] = serde_json::to_value(patch)?;
    }
    serde_json::to_vec(&review)
}

fn verdict(
    converter: &Converter,
    task: AdmissionTask,
    pod: &serde_json::Value,
    namespace: &str,
) -> Result<Verdict, ConversionError> {
    match task {
        AdmissionTask::Convert(dialect) => converter.admit(pod, namespace, dialect),
        AdmissionTask::RefuseLabel => Err(converter.refused_label(pod, namespace)),
    }
}
