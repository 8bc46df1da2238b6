{{- define "interlingua.selectorLabels" -}}
app.kubernetes.io/name: interlingua
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "interlingua.labels" -}}
{{ include "interlingua.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* A duration of the configuration's limits in seconds, rounded up. */}}
{{- define "interlingua.limitSeconds" -}}
{{- $config := fromYaml .values.config -}}
{{- if hasKey $config "Error" -}}{{- fail (printf "config is not valid YAML: %s" $config.Error) -}}{{- end -}}
{{- $text := dig "limits" .name .default $config | toString -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?(ms|s|m|h)$" $text) -}}
{{- fail (printf "limits.%s of config is %q; expected a number with a unit, such as 60s" .name $text) -}}
{{- end -}}
{{- $unit := regexFind "[a-z]+$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit) | ceil | int -}}
{{- end }}
