/** JSON schemas of the document as texts: the type of a value, and the fields of an object. */

/** Return the schema that a reference of the document names; another schema as it is. */
export function resolved(schema, document) {
  const name = schema.$ref?.replace("#/components/schemas/", "");
  return name === undefined ? schema : document.components.schemas[name];
}

/** Return the fields of a schema's object: [{name, type, isRequired, note}]. */
export function fieldsOf(schema, document) {
  const { properties = {}, required = [] } = resolved(schema, document);
  return Object.entries(properties).map(([name, field]) => ({
    name, type: typeOf(field, document), isRequired: required.includes(name), note: noteOf(field),
  }));
}

/** Return the objects that a schema's fields contain, each once, without the schema itself: [[name, schema]]. */
export function partsOf(schema, document) {
  const found = new Map();
  const visit = (one) => {
    if (one === null || typeof one !== "object") return;
    const name = one.$ref?.replace("#/components/schemas/", "");
    if (name !== undefined && !found.has(name)) {
      found.set(name, document.components.schemas[name]);
      visit(document.components.schemas[name]);
    }
    for (const value of Object.values(one)) visit(value);
  };
  visit(resolved(schema, document));
  return [...found].filter(([, part]) => part.properties !== undefined && part !== resolved(schema, document));
}

/** Return a short text for the type of a value, with its limits. */
export function typeOf(schema, document) {
  if (schema.$ref !== undefined) return schema.$ref.replace("#/components/schemas/", "");
  const members = schema.anyOf ?? schema.oneOf;
  if (members !== undefined) {
    const texts = members.filter((one) => one.type !== "null").map((one) => typeOf(one, document));
    return [...new Set(texts)].join(" or ");
  }
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum !== undefined) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${schema.items === undefined ? "any" : typeOf(schema.items, document)}`;
  return `${schema.type ?? "any"}${limitsOf(schema)}`;
}

function limitsOf(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low === undefined && high === undefined) return "";
  return ` (${low === undefined ? `at most ${high}` : high === undefined ? `from ${low}` : `${low} to ${high}`})`;
}

function noteOf(field) {
  const isShown = field.default !== undefined && field.default !== null;
  return isShown ? `default ${JSON.stringify(field.default)}` : "";
}
