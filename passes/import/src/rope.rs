//! Rotary parameters, in both spellings of the library: `rope_parameters` (which holds the base), and the older
//! `rope_theta` with `rope_scaling`.
//!
//! If both are given they must agree. Each kind of scaling has its own keys; any other key is refused, because ignoring
//! it could change the computation.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::{Pairs, Scaling};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::spec::{RotarySpec, Sizes};

/// The sizes and defaults that rotary positions depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct RopeContext {
    /// Width of a head.
    pub(super) head_dim: u64,
    /// `max_position_embeddings`; the default of the trained length.
    pub(super) max_positions: u64,
    /// The kinds of rope that the family supports, in the library's spelling.
    pub(super) types: &'static [&'static str],
    /// Whether the family may rotate a part of each head.
    pub(super) partial: Partial,
    /// The default base.
    pub(super) theta: f64,
}

impl RopeContext {
    /// The context of most families.
    pub(super) fn of(sizes: &Sizes) -> Self {
        Self {
            head_dim: sizes.head_dim,
            max_positions: sizes.max_positions,
            types: &["default", "linear", "llama3", "yarn"],
            partial: Partial::Whole,
            theta: 10_000.0,
        }
    }
}

/// Whether a family may rotate a part of each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Partial {
    /// All of a head is rotated.
    Whole,
    /// `partial_rotary_factor` of a head is rotated.
    Factor,
    /// As [`Factor`](Self::Factor), by default a half.
    Half,
    /// As [`Factor`](Self::Factor), by default so many elements.
    Elements(u64),
    /// As [`Factor`](Self::Factor), but the top level names it `rotary_pct` (default 0.25) and the base
    /// `rotary_emb_base`.
    Percent,
}

impl Partial {
    /// The names of the base and the rotated part at the top level, and the default part.
    fn names(self) -> (&'static str, &'static str, f64) {
        match self {
            Partial::Whole | Partial::Factor | Partial::Elements(_) => {
                ("rope_theta", "partial_rotary_factor", 1.0)
            }
            Partial::Half => ("rope_theta", "partial_rotary_factor", 0.5),
            Partial::Percent => ("rotary_emb_base", "rotary_pct", 0.25),
        }
    }
}

/// The rotary parameters at the top level of a description.
pub(super) struct Rope<'a> {
    cx: RopeContext,
    theta: Option<f64>,
    partial: Option<f64>,
    original: Option<u64>,
    key: &'static str,
    parameters: Option<&'a Map<String, Value>>,
    ignore: &'a [String],
}

impl<'a> Rope<'a> {
    /// Reads the top level of a description.
    ///
    /// # Errors
    /// `M03`, `M04` for invalid values, `M07` when both spellings are given and differ.
    pub(super) fn read(fields: &mut Fields<'a>, cx: RopeContext) -> Result<Self, Diagnostic> {
        let (theta, partial, _) = cx.partial.names();
        let (theta, partial) = (fields.positive(theta)?, fields.positive(partial)?);
        let original = fields.nullable_size("original_max_position_embeddings", None)?;
        let (new, old) = (fields.object("rope_parameters")?, fields.object("rope_scaling")?);
        let (key, parameters) = match (new, old) {
            (Some(new), Some(old)) if new != old => {
                let message = "`rope_parameters` and `rope_scaling` are both given and differ";
                return Err(Diagnostic::new("M07", message).help("keep one of them"));
            }
            (Some(new), _) => ("rope_parameters", Some(new)),
            (None, old) => ("rope_scaling", old),
        };
        Ok(Self { cx, theta, partial, original, key, parameters, ignore: fields.ignored() })
    }

    /// The same with these parameters where the description has none.
    pub(super) fn or_by_default<'b>(&self, parameters: Option<&'b Map<String, Value>>) -> Rope<'b>
    where
        'a: 'b,
    {
        let parameters = self.parameters.or(parameters);
        Rope { parameters, ..*self }
    }

    /// The rotary positions of every layer.
    ///
    /// # Errors
    /// `M03` to `M07`, naming the field.
    pub(super) fn of_model(&self) -> Result<RotarySpec, Diagnostic> {
        self.parse(format!("{}.", self.key), self.parameters)
    }

    /// The rotary positions of layers of one type: the parameters nested under its name if there are any.
    ///
    /// # Errors
    /// As [`of_model`](Self::of_model); `M07` when parameters are nested by type and this type has none.
    pub(super) fn of_layers(&self, layer_type: &str, all: &[&str]) -> Result<RotarySpec, Diagnostic> {
        let Some(parameters) = self.parameters else { return self.of_model() };
        if !all.iter().any(|ty| parameters.contains_key(*ty)) {
            return self.of_model();
        }
        let key = self.key;
        let stray = parameters.keys().find(|name| !all.contains(&name.as_str()));
        let (code, message) = match (stray, parameters.get(layer_type)) {
            (None, Some(Value::Object(map))) => return self.parse(format!("{key}.{layer_type}."), Some(map)),
            (Some(name), _) => (
                "M07",
                format!(
                    "`{key}` holds parameters for each type of layer, and `{name}`, which is not a type of layer"
                ),
            ),
            (None, Some(other)) => (
                "M05",
                format!("`{key}.{layer_type}` is {other}; layers without rotary positions are not supported"),
            ),
            (None, None) => ("M07", format!("`{key}` has no parameters for `{layer_type}`")),
        };
        Err(Diagnostic::new(code, message))
    }

    /// Whether there are parameters that are not nested by type of layer.
    pub(super) fn is_flat(&self) -> bool {
        self.parameters.is_some_and(|map| !map.is_empty() && !map.values().any(Value::is_object))
    }

    /// The base at the top level, or among parameters that are not nested.
    pub(super) fn base(&self) -> Option<f64> {
        self.theta.or_else(|| self.parameters?.get("rope_theta")?.as_f64())
    }

    /// The parameters of layers whose base is another, `theta` by default: those nested under their type, without scaling where
    /// parameters are not nested.
    pub(super) fn of_other_base(&self, theta: f64) -> Self {
        let is_nested = |map: &Map<String, Value>| map.values().any(Value::is_object);
        let parameters = self.parameters.filter(|map| is_nested(map));
        let cx = RopeContext { theta, ..self.cx };
        Self { cx, theta: None, partial: self.partial, original: self.original, parameters, ..*self }
    }

    /// The factor by which YaRN scales the scores in addition to cosine and sine, if `mscale_all_dim` is given: the
    /// square of `0.1 mscale_all_dim ln(factor) + 1`.
    ///
    /// # Errors
    /// `M03` when the value is not a number.
    pub(super) fn sharpening(&self, scaling: &Scaling) -> Result<f64, Diagnostic> {
        let (Scaling::Yarn { factor, .. }, Some(parameters)) = (scaling, self.parameters) else {
            return Ok(1.0);
        };
        let mut fields = Fields::new(parameters, format!("{}.", self.key), self.ignore);
        let mscale = fields.number("mscale_all_dim")?.unwrap_or(0.0);
        Ok(if mscale == 0.0 || *factor <= 1.0 { 1.0 } else { (0.1 * mscale * factor.ln() + 1.0).powi(2) })
    }

    fn parse(
        &self,
        prefix: String,
        parameters: Option<&Map<String, Value>>,
    ) -> Result<RotarySpec, Diagnostic> {
        let none = Map::new();
        let mut fields = Fields::new(parameters.unwrap_or(&none), prefix, self.ignore);
        let (new, old) = (fields.word("rope_type")?, fields.word("type")?);
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            let (name, alias) = (fields.path("rope_type"), fields.path("type"));
            let message = format!("`{name}` is \"{new}\", but `{alias}` is \"{old}\"");
            return Err(Diagnostic::new("M07", message));
        }
        let kind = new.or(old).unwrap_or("default");
        if !self.cx.types.contains(&kind) {
            let refusal = fields.unsupported("rope_type", &Value::from(kind));
            return Err(refusal.help(format!("supported here: {}", self.cx.types.join(", "))));
        }
        let (theta_name, partial_name, part) = self.cx.partial.names();
        let nested = fields.positive("rope_theta")?;
        let theta =
            agree(&fields.path("rope_theta"), nested, theta_name, self.theta)?.unwrap_or(self.cx.theta);
        let nested = fields.positive("partial_rotary_factor")?;
        let partial = agree(&fields.path("partial_rotary_factor"), nested, partial_name, self.partial)?;
        let part = match self.cx.partial {
            Partial::Elements(n) => n as f64 / self.cx.head_dim as f64,
            _ => part,
        };
        let width = self.width(partial.unwrap_or(part))?;
        let scaling = self.scaling(kind, theta, &mut fields)?;
        fields.finish(&[])?;
        Ok(RotarySpec { width, theta, scaling, pairs: Pairs::Halves })
    }

    fn width(&self, partial: f64) -> Result<u64, Diagnostic> {
        let RopeContext { head_dim, partial: allowed, .. } = self.cx;
        let width = match allowed {
            Partial::Whole if partial != 1.0 => {
                let message =
                    format!("`partial_rotary_factor` is {partial}; this family rotates whole heads");
                return Err(Diagnostic::new("M05", message));
            }
            Partial::Whole => head_dim,
            // Truncated towards zero, as in the library.
            Partial::Factor | Partial::Half | Partial::Elements(_) | Partial::Percent => {
                (head_dim as f64 * partial) as u64
            }
        };
        if width != 0 && width.is_multiple_of(2) && width <= head_dim {
            return Ok(width);
        }
        let message = format!(
            "rotary positions rotate pairs, but {width} of the {head_dim} elements of a head are rotated"
        );
        Err(Diagnostic::new("M07", message)
            .help("`head_dim` (or its part, `partial_rotary_factor`) must be even"))
    }

    fn scaling(&self, kind: &str, theta: f64, fields: &mut Fields<'_>) -> Result<Scaling, Diagnostic> {
        Ok(match kind {
            "default" => Scaling::None,
            "linear" => Scaling::Linear { factor: required(fields, "factor")? },
            "llama3" => {
                let factor = required(fields, "factor")?;
                let low = required(fields, "low_freq_factor")?;
                let high = required(fields, "high_freq_factor")?;
                if high < low {
                    let name = fields.path("high_freq_factor");
                    let message =
                        format!("`{name}` is {high}, which must not be below `low_freq_factor` {low}");
                    return Err(Diagnostic::new("M04", message));
                }
                Scaling::Llama3 { factor, low, high, original: self.original(fields)? }
            }
            "yarn" => self.yarn(theta, fields)?,
            _ => unreachable!("the caller checked the kind"),
        })
    }

    /// YaRN, with the library's rule for the factor of cosine and sine: `attention_factor` if given, else a ratio of
    /// `mscale` and `mscale_all_dim` if both are given and not zero, else `0.1 ln(factor) + 1`.
    fn yarn(&self, theta: f64, fields: &mut Fields<'_>) -> Result<Scaling, Diagnostic> {
        let original = self.original(fields)?;
        let factor = match fields.raw("factor") {
            // A null factor means the ratio of the lengths.
            Some(Value::Null) => self.cx.max_positions as f64 / original,
            _ => required(fields, "factor")?,
        };
        let (mscale, mscale_all_dim) = (fields.number("mscale")?, fields.number("mscale_all_dim")?);
        let sharpened = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let attention = match (fields.number("attention_factor")?, mscale, mscale_all_dim) {
            (Some(given), ..) => given,
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => sharpened(m) / sharpened(all),
            (None, ..) => sharpened(1.0),
        };
        // Zero means the default, as in the library.
        let beta = |x: Option<f64>, default: f64| x.filter(|&x| x != 0.0).unwrap_or(default);
        let beta_fast = beta(fields.number("beta_fast")?, 32.0);
        let beta_slow = beta(fields.number("beta_slow")?, 1.0);
        let truncate = fields.flag("truncate", true)?;
        if beta_fast < beta_slow || beta_slow < 0.0 || theta <= 1.0 || !attention.is_finite() {
            let message = format!(
                "yarn with beta_fast {beta_fast}, beta_slow {beta_slow}, base {theta} and attention factor {attention} \
                 has no ramp"
            );
            return Err(Diagnostic::new("M04", message)
                .help("`beta_fast` must be at least `beta_slow`, and the base above 1"));
        }
        Ok(Scaling::Yarn { factor, beta_fast, beta_slow, original, attention, truncate })
    }

    /// The trained length, tokens.
    fn original(&self, fields: &mut Fields<'_>) -> Result<f64, Diagnostic> {
        let name = "original_max_position_embeddings";
        let nested = fields.nullable_size(name, None)?.map(|n| n as f64);
        let outer = self.original.map(|n| n as f64);
        let original = agree(&fields.path(name), nested, name, outer)?;
        Ok(original.unwrap_or(self.cx.max_positions as f64))
    }
}

fn required(fields: &mut Fields<'_>, name: &str) -> Result<f64, Diagnostic> {
    let path = fields.path(name);
    fields.positive(name)?.ok_or_else(|| Diagnostic::new("M03", format!("`{path}` is missing")))
}

/// One value under two names, which must agree.
fn agree(
    name: &str,
    value: Option<f64>,
    other_name: &str,
    other: Option<f64>,
) -> Result<Option<f64>, Diagnostic> {
    match (value, other) {
        (Some(a), Some(b)) if a != b => {
            Err(Diagnostic::new("M07", format!("`{name}` is {a}, but `{other_name}` is {b}")))
        }
        (value, other) => Ok(value.or(other)),
    }
}
