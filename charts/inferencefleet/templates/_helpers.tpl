{{/* First part of every name. */}}
{{- define "inferencefleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" | trimSuffix "." -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" | trimSuffix "." -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" | trimSuffix "." -}}
{{- end -}}
{{- end -}}

{{- define "inferencefleet.operator" -}}
{{- printf "%s-operator" (include "inferencefleet.fullname" .) -}}
{{- end -}}

{{/* Prefix of names outside of the release's namespace: of releases with scope namespace there may be several in a cluster. */}}
{{- define "inferencefleet.elsewhere" -}}
{{- if eq .Values.scope "namespace" -}}{{- printf "%s-" .Release.Namespace -}}{{- end -}}
{{- end -}}
{{- define "inferencefleet.clusterName" -}}
{{- printf "%s%s" (include "inferencefleet.elsewhere" .) (include "inferencefleet.operator" .) -}}
{{- end -}}

{{/* Names of Services have at most 63 characters and no dot, which a release's name may have, and before Kubernetes 1.36 a letter
     first. */}}
{{- define "inferencefleet.serviceName" -}}
{{- regexReplaceAll "^([0-9])" (. | replace "." "-") "s-${1}" -}}
{{- end -}}

{{/* Service and Secret of the webhook. */}}
{{- define "inferencefleet.webhook" -}}
{{- printf "%s-webhook" (include "inferencefleet.fullname" . | include "inferencefleet.serviceName") -}}
{{- end -}}

{{- define "inferencefleet.metrics" -}}
{{- printf "%s-metrics" (include "inferencefleet.operator" . | include "inferencefleet.serviceName" | trunc 55 | trimSuffix "-") -}}
{{- end -}}

{{- define "inferencefleet.webhookConfiguration" -}}
{{- printf "%s%s" (include "inferencefleet.elsewhere" .) (include "inferencefleet.fullname" .) -}}
{{- end -}}

{{- define "inferencefleet.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "inferencefleet.operator" .) -}}
{{- end -}}

{{- define "inferencefleet.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* A version as the value of a label: build metadata may be long, and begins with a plus. */}}
{{- define "inferencefleet.labelled" -}}
{{- . | replace "+" "_" | trunc 63 | trimAll "-_." -}}
{{- end -}}

{{- define "inferencefleet.labels" -}}
{{ include "inferencefleet.selector" . }}
app.kubernetes.io/version: {{ include "inferencefleet.labelled" .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ include "inferencefleet.labelled" (printf "%s-%s" .Chart.Name .Chart.Version) }}
{{- end -}}

{{/* These and more, which win: a key that is there twice is no YAML to kustomize, and so to Flux. Arguments: those, the root. */}}
{{- define "inferencefleet.labelsWith" -}}
{{- merge (dict) (index . 0 | default dict) (include "inferencefleet.labels" (index . 1) | fromYaml) | toYaml -}}
{{- end -}}

{{/* An image by digest, else by tag, else by the chart's appVersion. Arguments: the image, the root. */}}
{{- define "inferencefleet.image" -}}
{{- $image := index . 0 -}}{{- $root := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* The namespaces that are watched, as a JSON list; empty with scope cluster. */}}
{{- define "inferencefleet.namespaces" -}}
{{- if eq .Values.scope "cluster" -}}[]{{- else -}}
{{- .Values.watchNamespaces | default (list .Release.Namespace) | uniq | toJson -}}
{{- end -}}
{{- end -}}

{{/* What the `restricted` Pod Security Standard asks of a pod, and of a container. */}}
{{- define "inferencefleet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- define "inferencefleet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
