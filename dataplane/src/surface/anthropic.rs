//! Anthropic's shape: the error envelope of `/v1/messages` and what is under it.
//!
//! Lives on: shards. View: one answer. Bound: `ERROR_BYTES_MAX`.
use iop_proto::reason::Reason;

use crate::text::{NoRoom, Writer};

/// `type` of an error: Anthropic's word for the status. What no server could do is the client's, as
/// in OpenAI's shape; 503 means "come again", which there is an overload.
const fn kind(reason: Reason) -> &'static str {
    match reason.status() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        400..=499 | 501 | 505 => "invalid_request_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        _ => "api_error",
    }
}

/// `{"type":"error","error":{"type","message"},"request_id"}`. A request id holds nothing that JSON
/// would have to escape.
pub(super) fn put_error(
    text: &mut Writer<'_>,
    reason: Reason,
    request_id: &[u8],
) -> Result<(), NoRoom> {
    text.put(b"{\"type\":\"error\",\"error\":{\"type\":")?;
    text.put_json_string(kind(reason))?;
    text.put(b",\"message\":")?;
    text.put_json_string(reason.text())?;
    text.put(b"},\"request_id\":\"")?;
    text.put(request_id)?;
    text.put(b"\"}")
}
