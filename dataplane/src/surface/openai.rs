//! OpenAI's shapes: errors, in-band stream errors, the list of models.
//!
//! Lives on: shards; `ModelCatalog` is made when a configuration is loaded. View: one answer; one
//! configuration. Bound: `ERROR_BYTES_MAX`; one rendered object per configured model.
use iop_control::names::Names;
use iop_proto::ids::ModelIndex;
use iop_proto::limits::NAME_BYTES_MAX;
use iop_proto::reason::Reason;

use crate::keys::{Caller, KeyTable};
use crate::text::{NoRoom, Writer};

pub mod run;
pub mod tools;

/// `type` of an error object.
const fn kind(reason: Reason) -> &'static str {
    match reason.status() {
        401 => "authentication_error",
        429 => "rate_limit_error",
        // What the client asked for and no server could do.
        400..=499 | 501 | 505 => "invalid_request_error",
        _ => "server_error",
    }
}

/// The request parameter an error is about.
const fn param(reason: Reason) -> Option<&'static str> {
    let of_model = matches!(
        reason,
        Reason::ModelMissing | Reason::ModelDuplicate | Reason::ModelUnknown
    );
    if of_model { Some("model") } else { None }
}

/// `{"error":{"type","message","param","code"}}`.
pub(super) fn put_error(text: &mut Writer<'_>, reason: Reason) -> Result<(), NoRoom> {
    text.put(b"{")?;
    put_nested(text, reason)?;
    text.put(b"}")
}

/// The `error` event of a Responses stream, its fields beside the object that readers of the other
/// streams know. Its number in the sequence is left out: only the provider has counted.
pub(super) fn put_responses_error(text: &mut Writer<'_>, reason: Reason) -> Result<(), NoRoom> {
    text.put(b"{\"type\":\"error\",")?;
    put_fields(text, reason)?;
    text.put(b",")?;
    put_nested(text, reason)?;
    text.put(b"}")
}

fn put_nested(text: &mut Writer<'_>, reason: Reason) -> Result<(), NoRoom> {
    text.put(b"\"error\":{\"type\":")?;
    text.put_json_string(kind(reason))?;
    text.put(b",")?;
    put_fields(text, reason)?;
    text.put(b"}")
}

fn put_fields(text: &mut Writer<'_>, reason: Reason) -> Result<(), NoRoom> {
    text.put(b"\"message\":")?;
    text.put_json_string(reason.text())?;
    text.put(b",\"param\":")?;
    match param(reason) {
        Some(name) => text.put_json_string(name)?,
        None => text.put(b"null")?,
    }
    text.put(b",\"code\":")?;
    text.put_json_string(reason.label())
}

/// The models of one configuration, each rendered once. `[D-17]` `[P-58]`
#[derive(Debug)]
pub struct ModelCatalog {
    /// Objects one after another, without commas.
    text: Vec<u8>,
    /// Where each model's object ends, by row; that of a model which is gone is empty.
    ends: Vec<usize>,
    /// Every model's name as a JSON string, one after another, and where each ends.
    name_text: Vec<u8>,
    name_ends: Vec<usize>,
}

const LIST_START: &[u8] = b"{\"object\":\"list\",\"data\":[";
const LIST_END: &[u8] = b"]}";

impl ModelCatalog {
    #[must_use]
    pub fn new(names: &Names) -> Self {
        let (mut text, mut ends) = (Vec::new(), Vec::new());
        let (mut name_text, mut name_ends) = (Vec::new(), Vec::new());
        // Six bytes for each of the name's, were it all control characters, and the rest.
        let mut object = vec![0; 6 * NAME_BYTES_MAX as usize + 128];
        for (row, model) in names.models.iter().enumerate() {
            if ModelIndex::new(row).is_some_and(|index| names.has_model(index)) {
                let mut out = Writer::new(&mut object);
                put_model(&mut out, &model.name, model.created)
                    .expect("a name of NAME_BYTES_MAX fits");
                let len = out.written();
                text.extend_from_slice(&object[..len]);
            }
            // A request that has begun goes on to name a model that is gone.
            let mut out = Writer::new(&mut object);
            out.put_json_string(&model.name)
                .expect("a name of NAME_BYTES_MAX fits");
            let len = out.written();
            name_text.extend_from_slice(&object[..len]);
            name_ends.push(name_text.len());
            ends.push(text.len());
        }
        Self {
            text,
            ends,
            name_text,
            name_ends,
        }
    }

    /// The model's name as a JSON string.
    #[must_use]
    pub fn name(&self, model: ModelIndex) -> &[u8] {
        &self.name_text[start(&self.name_ends, model)..self.name_ends[model.row()]]
    }

    /// Answer to `GET /v1/models/{id}`.
    #[must_use]
    pub fn model(&self, model: ModelIndex) -> &[u8] {
        &self.text[start(&self.ends, model)..self.ends[model.row()]]
    }

    /// Answer to `GET /v1/models` in pieces: the models that `caller` may name, in configured order.
    pub fn list<'a>(
        &'a self,
        keys: &'a KeyTable,
        caller: Caller,
    ) -> impl Iterator<Item = &'a [u8]> + Clone + 'a {
        let permitted = (0..self.ends.len())
            .filter_map(ModelIndex::new)
            .filter(move |&model| keys.permits(caller, model))
            .filter(|&model| !self.model(model).is_empty());
        let objects = permitted.enumerate().flat_map(|(place, model)| {
            let comma: &[u8] = if place == 0 { b"" } else { b"," };
            [comma, self.model(model)]
        });
        [LIST_START].into_iter().chain(objects).chain([LIST_END])
    }

    /// Bytes of that answer.
    #[must_use]
    pub fn list_bytes(&self, keys: &KeyTable, caller: Caller) -> u64 {
        self.list(keys, caller)
            .map(|piece| piece.len() as u64)
            .sum()
    }
}

/// Where the piece of `model` starts, of pieces that end at `ends`.
fn start(ends: &[usize], model: ModelIndex) -> usize {
    let before = model.row().checked_sub(1);
    before.map_or(0, |before| ends[before])
}

fn put_model(text: &mut Writer<'_>, name: &str, created: u64) -> Result<(), NoRoom> {
    text.put(b"{\"id\":")?;
    text.put_json_string(name)?;
    text.put(b",\"object\":\"model\",\"created\":")?;
    text.put_decimal(created)?;
    text.put(b",\"owned_by\":\"iop\"}")
}

/// The model id that a path holds percent-encoded, decoded into `out`. `None` for a broken escape or
/// an id longer than any name.
#[must_use]
pub fn decode_model_id<'a>(
    encoded: &[u8],
    out: &'a mut [u8; NAME_BYTES_MAX as usize],
) -> Option<&'a [u8]> {
    let (mut at, mut len) = (0, 0);
    while let Some(&byte) = encoded.get(at) {
        let (byte, width) = match byte {
            b'%' => {
                let digit = |&b: &u8| {
                    char::from(b)
                        .to_digit(16)
                        .and_then(|d| u8::try_from(d).ok())
                };
                let (high, low) = (encoded.get(at + 1)?, encoded.get(at + 2)?);
                (digit(high)? << 4 | digit(low)?, 3)
            }
            plain => (plain, 1),
        };
        *out.get_mut(len)? = byte;
        len += 1;
        at += width;
    }
    Some(&out[..len])
}
